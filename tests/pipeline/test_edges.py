"""What users do to a pipeline beside training it: values of all kinds between stages, weights that are nobody's, data that ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.pipeline import common
from tests.ranks import run_ranks
from zeroengine.errors import ModelError, ZeroEngineError
from zeroengine.pipeline.actions import Action, Kind
from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.schedules import schedule_rule
from zeroengine.pipeline.stage import as_input
from zeroengine.pipeline.wire import layout_of

WIDTH, MICRO = 4, 4
Pair = tuple[Tensor, Tensor]


def pairs(step: int, count: int = MICRO) -> list[Pair]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)) for _ in range(count)]


def linear(count: int = 4) -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)]


def module(layers: list[Any] | None = None, loss: Any = F.mse_loss, stages: int = 2, **options: Any) -> PipelineModule:
    return PipelineModule(layers or linear(), stages, loss, partition_method="uniform", **options)


def engine_of(model: PipelineModule, stage: int = 0, **more: Any) -> Any:
    return zeroengine.initialize(model=model, config=common.config(stage, MICRO, **more))[0]


def steps(engine: Any, first: int = 0, count: int = 2) -> list[float]:
    return [float(engine.train_batch(iter(pairs(step)))) for step in range(first, first + count)]


def whole(layers: list[Any] | None = None, loss: Any = F.mse_loss, autocast: bool = False, count: int = 2) -> list[float]:
    """Losses of one process."""
    model = module(layers, loss, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            parts = [model.loss(model(x), y) for x, y in pairs(step)]
        mean = torch.stack(parts).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


def told(act: Callable[[], Any]) -> str:
    try:
        return f"no error, {act()}"
    except (ZeroEngineError, StopIteration) as error:
        return str(error)


# --- what crosses ---------------------------------------------------------------------------------------------------------


class Giver(nn.Module):
    """(hidden states, a value that depends on how often this was called)."""

    def __init__(self, value: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.inner, self.value, self.calls = nn.Linear(WIDTH, WIDTH), value, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.inner(x)
        return x, self.value(x, self.calls)


class Taker(nn.Module):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, given: Any) -> Tensor:
        x, value = given
        self.seen.append(repr(value))
        return x


@dataclasses.dataclass
class Hidden:
    x: Tensor


_numbers: set[int] = set()
_array = numpy.zeros(1, dtype=int)


def _grown(x: Tensor, calls: int) -> set[int]:
    _numbers.clear()
    _numbers.update(range(calls))
    return _numbers


def _counted(x: Tensor, calls: int) -> Any:
    _array[0] = calls
    return _array


VALUES: dict[str, Callable[[Tensor, int], Any]] = {
    "True and 1": lambda x, calls: True if calls % 2 else 1,
    "1 and 1.0": lambda x, calls: 1 if calls % 2 else 1.0,
    "a set that grows": _grown,
    "an array that changes": _counted,
}


def _crossings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule in ("1f1b", "zb-v"):  # to another rank, and to the next stage on the same one
        for name, value in VALUES.items():
            seen: list[str] = []
            between = [LayerSpec(Giver, value), LayerSpec(Taker, seen)]
            layers = between if schedule == "1f1b" else [LayerSpec(nn.Tanh), *between, LayerSpec(nn.Tanh)]
            engine = engine_of(module(layers, schedule=schedule))
            steps(engine, count=1)
            engine.destroy()
            found[f"{schedule}, {name}"] = seen
    return found


# --- weights of several stages, or of none -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(output * self.factor, labels)


def _shared() -> dict[str, Callable[[], Any]]:
    one, table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.eye(WIDTH))
    rest = [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return {
        "module": lambda: module([one, *rest, one]),
        "closure": lambda: module([one, *rest, lambda x: F.linear(x, one.weight)]),
        "partial": lambda: module([one, *rest, partial(torch.matmul, table)]),
        "method": lambda: module([*rest, nn.Tanh(), one.forward]),
        "loss": lambda: module([*rest, nn.Tanh(), nn.Tanh()], lambda x, y: F.mse_loss(one(x), y)),
        "on one stage": lambda: module([*rest, one, lambda x: F.linear(x, one.weight)]),
        "of a whole model": lambda: module(list(model), lambda x, y: F.mse_loss(x, y) + 0 * len(model)),
    }


def _unlike(last: TiedLayerSpec, freezes: bool = False) -> PipelineModule:
    model = module([TiedLayerSpec("k", nn.Linear, WIDTH, WIDTH), *linear(2), last])
    if freezes and "0" in model.layers:
        model.layers["0"].requires_grad_(False)
    return model


UNLIKE = {
    "shape": (partial(TiedLayerSpec, "k", nn.Linear, WIDTH, WIDTH + 1), False),
    "type": (partial(TiedLayerSpec, "k", nn.Linear, WIDTH, WIDTH, dtype=torch.float64), False),
    "frozen": (partial(TiedLayerSpec, "k", nn.Linear, WIDTH, WIDTH), True),
}


# --- the engine ---------------------------------------------------------------------------------------------------------------


class Again(nn.Module):
    """Counts how often its inner layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)


class OfTransformers(Again):
    gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) if torch.is_grad_enabled() and self.training else super().forward(x)


def _recomputed(schedule: str, layer: type[Again], each: int) -> tuple[int, int, list[float]]:
    model = module([LayerSpec(layer) for _ in range(4)], schedule=schedule, activation_checkpoint_interval=each)
    engine = engine_of(model, 2)
    losses = steps(engine)
    engine.destroy()
    return sum(m.runs for m in model.modules() if isinstance(m, Again)), engine.last_run.peak_live, losses


def _parked() -> tuple[str, str, bool]:
    engine = engine_of(module(), 3)
    steps(engine, 0, 1)
    engine.offload_states()
    messages = told(lambda: steps(engine, 1, 1)), told(lambda: engine.eval_batch(iter(pairs(1)), MICRO))
    engine.reload_states()
    again = steps(engine, 1, 1)
    engine.destroy()
    return (*messages, again == pytest.approx(whole()[1:], rel=1e-6))


def _formats() -> list[Any]:
    """Layers that stay in fp32, named on another stage or on none; a weight that bitsandbytes has packed, on the last stage only."""
    low = {"bf16": {"enabled": True}}
    model = module()
    for layer in model.layers.values():
        layer.support_avx512bf16_for_cpu = True
    engine = engine_of(model, 1, data_types={"keep_in_fp32_modules": ["layers.3"]}, **low)
    steps(engine, count=1)
    found: list[Any] = [{n: m.weight.dtype for n, m in model.layers.items()}]
    packs = [m.support_avx512bf16_for_cpu for m in model.layers.values()]
    engine.destroy()
    found.append((packs, [m.support_avx512bf16_for_cpu for m in model.layers.values()]))
    found.append(told(lambda: engine_of(module(), 1, data_types={"keep_in_fp32_modules": ["layers.3", "layer.3"]}, **low)))
    packed = module()
    if "3" in packed.layers:
        packed.layers["3"].weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    found.append(told(lambda: engine_of(packed, 1)))
    return found


def _evaluated() -> list[Any]:
    engine = engine_of(module())
    mean, outputs = engine.eval_batch(iter(pairs(0)), 2, return_logits=True)
    found = [float(mean), None if outputs is None else tuple(outputs.shape)]
    outputs = engine.eval_batch(iter(pairs(0)), 2, compute_loss=False)
    found += [None if outputs is None else len(outputs), float(engine.eval_batch(iter(pairs(0)), 2)), engine.last_run.outputs]
    found += [told(lambda n=n: engine.eval_batch(iter(pairs(0)), n)) for n in (0, True)]
    engine.set_dataiterator(iter(pairs(0)))
    engine.set_batch_fn(lambda pair: (pair[0] * 2, pair[1]))
    found += [float(engine.train_batch()), engine.is_first_stage(), engine.is_last_stage(), engine.stage_id, engine.micro_batches]
    engine.destroy()
    return found


@schedule_rule("reversed", placement=lambda ranks, chunks: tuple(reversed(range(ranks))))
def backwards(ranks: int, micro: int, chunks: int) -> Any:
    """The first stage on the last rank."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(k, ranks - 1 - r, i) for i in range(micro) for k in kinds] for r in range(ranks)]


class Samples(torch.utils.data.Dataset[Pair]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Pair:
        return tuple(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)))  # type: ignore[return-value]


def _resumed(folder: str) -> tuple[list[float], list[float], list[Any]]:
    """From the middle of a pass over a dataset, which only one rank reads."""

    def fresh() -> Any:
        config = common.config(1, 2)
        return zeroengine.initialize(model=module(schedule=backwards), config=config, training_data=Samples())[0]

    engine = fresh()
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch()) for _ in range(3)]
    states = [engine.training_dataloader.state_dict()]
    engine.destroy()
    engine = fresh()
    engine.load_checkpoint(folder)
    again = [float(engine.train_batch()) for _ in range(3)]
    states.append(engine.training_dataloader.state_dict())
    engine.destroy()
    return losses, again, states


def _two(rank: int, world: int, folder: str) -> dict[str, Any]:
    zeroengine.init_distributed(verbose=False)
    found: dict[str, Any] = {"shared": {name: told(make) for name, make in _shared().items()}}
    found["unlike"] = {name: told(lambda m=make, f=freezes: engine_of(_unlike(m(), f))) for name, (make, freezes) in UNLIKE.items()}
    with zeroengine.zero.Init():
        found["init"] = told(module)
    engine = engine_of(module(), 1, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    found["autocast"] = steps(engine)
    engine.destroy()
    engine = engine_of(module(None, Scaled(), schedule="zb-h1"), 2)
    found["loss"] = (
        steps(engine),
        sorted(n for n in engine.full_state_dict() or () if "loss" in n),
        hasattr(engine.module.loss_fn, "factor"),
    )
    engine.destroy()
    found["again"] = [_recomputed(s, layer, each) for layer, each in ((Again, 2), (OfTransformers, 0)) for s in ("1f1b", "zb-h1", "zb-v")]
    found["parked"], found["evaluated"], found["resumed"] = _parked(), _evaluated(), _resumed(folder)
    found["crossings"], found["formats"] = _crossings(), _formats()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_two, 2, str(tmp_path_factory.mktemp("edges")), timeout=150)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_values_arrive_as_they_were_sent(two: list[dict[str, Any]], schedule: str) -> None:
    taker = 1  # of zb-v's four stages the third is on rank 1 as well
    for name, value in VALUES.items():
        seen = two[taker]["crossings"][f"{schedule}, {name}"]
        assert seen == [repr(value(torch.empty(0), calls)) for calls in range(1, MICRO + 1)], name


@pytest.mark.parametrize("crosses", [layout_of, as_input])
def test_a_gradient_that_could_not_come_back_is_refused(crosses: Callable[[Any, str], Any]) -> None:
    """To another rank, and to the next stage on the same one."""
    x = torch.ones(2, requires_grad=True)
    crosses((x, Hidden(x.detach())), "to stage 1")
    for value, reason in ((Hidden(x), r"\(Hidden\): there is a tensor that requires grad"), (lambda: x, r"\(function\)")):
        with pytest.raises(ModelError, match=f"to stage 1: .*{reason}"):
            crosses((x, value), "to stage 1")


def test_weights_that_stages_would_train_apart_are_refused(two: list[dict[str, Any]]) -> None:
    for found in (r["shared"] for r in two):
        assert "layer 0 of stage 0 and layer 3 of stage 1 share the parameter 'weight'" in found["module"]
        assert "layer 3 is a function that uses a parameter of layer 0, which stage 1 does not have" in found["closure"]
        for name in ("partial", "method", "loss"):
            assert "is a function that uses a parameter of no layer" in found[name], name
        assert found["on one stage"].startswith("no error") and found["of a whole model"].startswith("no error")


def test_stages_are_not_built_inside_init(two: list[dict[str, Any]]) -> None:
    assert all("build the module outside of it" in r["init"] for r in two)


@pytest.mark.parametrize("name", UNLIKE)
def test_tied_weights_that_are_not_alike_are_refused_on_all_ranks(two: list[dict[str, Any]], name: str) -> None:
    assert two[0]["unlike"][name] == two[1]["unlike"][name]
    assert "the tied weight 'tied.k.weight' must be alike on all stages" in two[0]["unlike"][name]


def test_autocast_reaches_the_stages(two: list[dict[str, Any]]) -> None:
    assert two[0]["autocast"] == two[1]["autocast"] == pytest.approx(whole(autocast=True), rel=1e-3)
    assert two[0]["autocast"] != pytest.approx(whole(), rel=1e-6)


def test_a_loss_with_weights_belongs_to_the_last_stage(two: list[dict[str, Any]]) -> None:
    want = whole(loss=Scaled())
    for rank, (losses, names, has) in enumerate(r["loss"] for r in two):
        assert losses == pytest.approx(want, rel=1e-6) and has == (rank == 1)
        assert names == ([] if rank else ["loss_fn.factor"])


def test_layers_run_again_once_whatever_the_schedule(two: list[dict[str, Any]]) -> None:
    want = whole([LayerSpec(Again) for _ in range(4)])
    for found in (r["again"] for r in two):
        for runs, _, losses in found:
            assert runs == 2 * 2 * 2 * MICRO  # steps, layers of a rank, forward and again
            assert losses == pytest.approx(want, rel=1e-5)


def test_states_that_are_away_are_an_error_of_all_stages(two: list[dict[str, Any]]) -> None:
    for trained, evaluated, same in (r["parked"] for r in two):
        assert "reload_states" in trained and "reload_states" in evaluated and same


def test_formats_of_weights_are_looked_after_on_all_stages(two: list[dict[str, Any]]) -> None:
    assert two[0]["formats"][0] == {"0": torch.bfloat16, "1": torch.bfloat16}
    assert two[1]["formats"][0] == {"2": torch.bfloat16, "3": torch.float32}
    for rank in two:
        _, packs, name, packed = rank["formats"]
        assert packs == ([False] * 2, [True] * 2)
        assert "is called 'layer.3';" in name
        assert "'layers.3.weight' was packed" in packed


def test_what_scripts_ask_a_pipelines_engine(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(r["evaluated"] for r in two):
        mean, shape, count, plain, kept, zero, true, doubled, *facts = found
        assert mean == plain and kept == {}
        assert (shape, count) == ((None, None) if rank == 0 else ((4, WIDTH), 2))
        assert "num_micro_batches is 0" in zero and "num_micro_batches is True" in true
        assert facts == [rank == 0, rank == 1, rank, MICRO]
        assert doubled != pytest.approx(whole()[0], rel=1e-4)


def test_data_goes_on_where_it_stood_wherever_the_first_stage_is(two: list[dict[str, Any]]) -> None:
    for losses, again, states in (r["resumed"] for r in two):
        assert again == pytest.approx(losses, rel=1e-6) and states[0] == states[1] == two[0]["resumed"][2][0]


def _uneven(rank: int, world: int) -> tuple[list[float], list[str], int, Any]:
    """Two pipelines, of which one has data for two steps and a half, and the other for more."""
    zeroengine.init_distributed(verbose=False)
    engine = engine_of(module(), 2)
    losses, ends = [], []

    def epoch(number: int) -> Iterator[Pair]:
        return iter(pairs(number, 10 if engine.mesh.sample_group == 0 else 13))

    for number in range(2):
        data = epoch(number)
        try:
            while True:
                losses.append(float(engine.train_batch(data)))
        except StopIteration as end:
            ends.append(str(end))
    return losses, ends, engine.global_steps, engine.full_state_dict()


def test_data_that_ends_in_one_pipeline_ends_all() -> None:
    results = run_ranks(_uneven, 4, timeout=60)
    model = module(stages=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    want = []
    for number in range(2):
        for start in (0, 4):
            micro = [pairs(number, count)[start : start + 4] for count in (10, 13)]
            loss = torch.stack([F.mse_loss(model(x), y) for part in micro for x, y in part]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            want.append(float(loss.detach()))
    for losses, ends, count, _ in results:
        assert losses == pytest.approx(want, rel=1e-6) and count == 4
        assert ends == ["the data ended before 4 micro-batches were read"] * 2
    weights = results[0][3]
    assert all(torch.allclose(weights[n], p, atol=2e-6) for n, p in model.state_dict().items())
