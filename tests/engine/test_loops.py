"""Loops in which the ranks have unlike work: calls of a part of the model, tokens, batches, generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroengine
from tests.engine.versus_torch import DEFAULT, STAGES, TINY, Where, check, clean, difference, fresh, one_mesh, run_jobs, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import DivergenceError, ModelError
from zeroengine.logging import logger
from zeroengine.zero import GatheredParameters

pytestmark = pytest.mark.ranks
D = 6
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def make(mesh: Any, build: Callable[[], nn.Module], stage: int, bucket: int | None = TINY, **config: Any) -> Any:
    zero = {"stage": stage, **({"bucket_size": bucket} if bucket else {}), **config.pop("zero", {})}
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": zero, **config}
    return zeroengine.initialize(model=fresh(build), config={k: v for k, v in settings.items() if v is not None}, mesh=mesh)[0]


def compare(label: str, engine: Any, expected: nn.Module, faults: list[str], tolerance: float = 1e-6) -> None:
    worst, who = difference(whole_weights(engine), {n: p.detach() for n, p in expected.named_parameters()})
    if not worst <= tolerance:
        faults.append(f"{label}: weights differ by {worst:.2e} in {who}")
    engine.destroy()


# --- calls of a part of the model --------------------------------------------------------------------------------------


class Trunk(nn.Module):
    """`calls`: how often the head runs on the trunk's output, in a row or with the trunk between."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, calls: int, between: bool = False) -> Tensor:
        x = self.trunk(x).tanh()
        total = self.head(x)
        for _ in range(calls - 1):
            x = self.trunk(x).tanh() if between else x * 0.5
            total = total + self.head(x)
        return total.square().mean()


def _calls(rank: int, ranks: int) -> list[str]:
    """A part that is still gathered costs no collective, so it may run in other numbers on each rank: to the same end."""
    mesh, faults = one_mesh(), []
    for stage in STAGES:
        for bucket in (TINY, DEFAULT):
            model = fresh(Trunk)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = make(mesh, Trunk, stage, bucket)
            for step in range(2):
                for r in range(ranks):
                    (model(Where(step, 0, r, ranks).data(3, D), 1 + 2 * r) / ranks).backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.backward(engine(Where(step, 0, rank, ranks).data(3, D), 1 + 2 * rank))
                engine.step()
            compare(f"stage {stage}, bucket {bucket}", engine, model, faults)
    return faults


def test_a_part_that_ranks_call_in_other_numbers(found: list[dict[str, Any]]) -> None:
    clean(found, _calls)


def _calls_between(rank: int, ranks: int) -> str:
    engine = make(one_mesh(), Trunk, 3)
    try:
        engine.backward(engine(Where(0, 0, rank, ranks).data(3, D), 1 + 2 * (rank == 1), True))
        engine.step()
    except DivergenceError as error:
        return str(error)
    return "accepted"


def test_parts_that_need_other_gathers_are_named() -> None:
    for told in run_ranks(_calls_between, 3, timeout=40):
        assert "trunk" in told and "head" in told and "ranks 0, 2: " in told and "rank 1: operation" in told, told


# --- tokens ------------------------------------------------------------------------------------------------------------

COUNTS = {2: [[1, 5], [2, 8]], 3: [[0, 4], [7, 0], [3, 1]]}  # valid tokens of each rank's micro-batches


def words(step: int, micro: int, rank: int, valid: int) -> tuple[Tensor, Tensor]:
    x = Where(step, micro, rank, 3).data(8, D)
    y = torch.full((8,), -100)
    y[:valid] = torch.arange(valid) % D
    return x, y


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


KINDS: dict[str, dict[str, Any]] = {
    "mean": {}, "sum": {"gradient_reduction": "sum"}, "clipped": {"gradient_clipping": 0.2}, "prescaled": {"prescale_gradients": True},
    "torch's optimizer": {"optimizer": None}, "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}}, "bf16": {"bf16": {"enabled": True}},
    "matrices": {"optimizer": {"type": "Lamb", "params": {"lr": 0.02}}},
}  # fmt: skip


def _tokens(rank: int, ranks: int) -> list[str]:
    """Sums over tokens and their numbers: the gradient of one process on all tokens, however they are dealt out."""
    mesh, faults = one_mesh(), []
    for kind, config in KINDS.items():
        for stage in STAGES:
            engine = _token_engine(mesh, stage, dict(config))
            reference = _token_engine(mesh, 0, {**config, "gradient_reduction": "sum"})  # the same update of one rank's gradients
            norms = []
            for step in range(2):
                for micro, valid in enumerate(COUNTS[ranks][rank]):
                    engine.backward(token_loss(engine, *words(step, micro, rank, valid)), tokens=valid)
                    engine.step()
                total = sum(map(sum, COUNTS[ranks]))
                whole = [words(step, m, r, n) for r, row in enumerate(COUNTS[ranks]) for m, n in enumerate(row)]
                x, y = (torch.cat(t) for t in zip(*whole, strict=True))
                share = ranks * len(COUNTS[ranks][0])  # every rank has all of it, and accumulation divides
                for _ in COUNTS[ranks][0]:
                    reference.backward(token_loss(reference, x, y) / total / share * len(COUNTS[ranks][0]))
                    reference.step()
                norms.append((engine.get_global_grad_norm(), reference.get_global_grad_norm()))
            rough = kind in ("fp16", "bf16")
            if any(abs(a - b) > (2e-2 if rough else 1e-5) * b for a, b in norms):
                faults.append(f"{kind} stage {stage}: norms {norms}")
            worst, who = difference(whole_weights(engine), whole_weights(reference))
            if not worst <= (1e-2 if rough else 2e-6):
                faults.append(f"{kind} stage {stage}: {who} differs by {worst:.2e}")
            engine.destroy()
            reference.destroy()
    return faults


def _token_engine(mesh: Any, stage: int, config: dict[str, Any]) -> Any:
    if "optimizer" not in config:
        return make(mesh, mlp, stage, gradient_accumulation_steps=2, **config)
    zero = {"stage": stage, "bucket_size": TINY}
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": zero, **config}
    factory = None if settings["optimizer"] else lambda groups: torch.optim.Adagrad(groups, lr=0.1)
    settings = {k: v for k, v in settings.items() if v is not None}
    return zeroengine.initialize(model=fresh(mlp), optimizer=factory, config=settings, mesh=mesh)[0]


def test_a_mean_over_all_tokens_however_they_are_dealt_out(found: list[dict[str, Any]]) -> None:
    clean(found, _tokens)


def _misused_tokens(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    engine = make(mesh, mlp, 1, gradient_accumulation_steps=2)
    x, y = words(0, 0, rank, 3)

    def refused(call: Callable[[], Any], text: str, kind: type[Exception] = ValueError) -> None:
        try:
            call()
            faults.append(f"accepted: {text}")
        except kind as error:
            if text not in str(error):
                faults.append(str(error))

    refused(lambda: engine.backward(token_loss(engine, x, y), tokens=-1), "0 or more")
    engine.zero_grad()
    engine.backward(token_loss(engine, x, y), tokens=3)
    engine.step()
    refused(lambda: engine.backward(token_loss(engine, x, y)), "give it to all of them")
    engine.destroy()
    engine = make(mesh, mlp, 1)
    before = whole_weights(engine)
    engine.backward(token_loss(engine, *words(0, 0, rank, 0)), tokens=0)
    engine.step()  # no token anywhere: no NaN, and nothing moves
    if not engine.was_step_applied() or difference(whole_weights(engine), before)[0]:
        faults.append("a step without tokens")
    engine.backward(token_loss(engine, x, y), **({"tokens": 3} if rank == 0 else {}))
    refused(engine.step, "tokens of the step", DivergenceError)
    return faults


def test_tokens_that_only_some_give_are_refused() -> None:
    check(_misused_tokens)


# --- batches -----------------------------------------------------------------------------------------------------------


def _uneven(rank: int, ranks: int) -> list[str]:
    """3 batches on rank 0, 2 on rank 1, 1 on rank 2: every sample once, none twice."""
    mesh, faults = one_mesh(), []
    for stage in STAGES:
        engine = make(mesh, mlp, stage)
        model = fresh(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for batch, mine in engine.even([(i, rank) for i in range(3 - rank)]):
            x, y = words(*batch, rank, 4)
            loss = token_loss(engine, x, y)
            engine.backward(loss if mine else loss * 0.0, tokens=4 if mine else 0)
            engine.step()
            seen.append((batch, mine))
        if [b for b, mine in seen if mine] != [(i, rank) for i in range(3 - rank)] or len(seen) != 3:
            faults.append(f"stage {stage}: {seen}")
        for i in range(3):
            there = [r for r in range(ranks) if i < 3 - r]
            for r in there:
                (token_loss(model, *words(i, r, r, 4)) / (4 * len(there))).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare(f"stage {stage}", engine, model, faults, 2e-6)
    engine = make(mesh, mlp, 3)
    try:
        list(engine.even([1] if rank else []))
        faults.append("nothing to repeat: accepted")
    except ModelError as error:
        if "ranks [0] have no item" not in str(error):
            faults.append(str(error))
    return faults


def test_ranks_with_unlike_numbers_of_batches(found: list[dict[str, Any]]) -> None:
    clean(found, _uneven)


# --- generation --------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(7, D), nn.Linear(D, D), nn.Linear(D, 7)
        self.forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.forwards += 1
        return self.head(self.mid(self.embed(ids)).tanh())


@torch.no_grad()
def _rollout(rank: int, ranks: int) -> list[str]:
    """Rank 0 stops after 2 tokens, the last one after 5; then all call a second, frozen model."""
    mesh, faults = one_mesh(), []
    policy = make(mesh, Decoder, 3)
    frozen = make(mesh, Decoder, 3, optimizer=None)
    lengths = [2, 5] if ranks == 2 else [2, 4, 5]
    ids, generated = torch.tensor([[rank]]), 0
    while policy.any_rank(generated < lengths[rank]):
        following = policy(ids)[:, -1:].argmax(-1)
        if generated < lengths[rank]:
            ids, generated = torch.cat([ids, following], 1), generated + 1
    scores = frozen(ids)
    if (policy.module.forwards, generated, scores.shape[1]) != (5, lengths[rank], lengths[rank] + 1):
        faults.append(f"{policy.module.forwards} forwards, {generated} tokens")
    alone = fresh(Decoder)
    want = torch.tensor([[rank]])
    for _ in range(lengths[rank]):
        want = torch.cat([want, alone(want)[:, -1:].argmax(-1)], 1)
    if not torch.equal(ids, want):
        faults.append(f"{ids} instead of {want}")
    return faults


def test_ranks_that_generate_unlike_lengths_stop_together(found: list[dict[str, Any]]) -> None:
    clean(found, _rollout)


def _skips_inference(rank: int, ranks: int) -> str:
    engine = make(one_mesh(), Decoder, 3, optimizer=None)
    try:
        with torch.no_grad():
            for _ in range(3 - rank):
                engine(torch.tensor([[1]]))
        engine.mesh.control.barrier("end of the evaluation")
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_a_rank_that_skips_inference_is_named() -> None:
    first, second = run_ranks(_skips_inference, 2, timeout=60, failures=True)
    for told in (first, second):
        text = f"{told.value}{told.error}"
        assert "barrier 'end of the evaluation'" in text and "all_gather 'embed.weight'" in text and "rank 1" in text, text


def _gathered_once(rank: int, ranks: int) -> list[str]:
    """Generation inside a gather of everything, by the bare module and in unlike numbers; then the step of one who never did."""
    mesh, faults = one_mesh(), []
    calls = mesh.shard_params.traffic.calls
    x, y = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4 + rank]])
    for bucket in (TINY, DEFAULT):
        results = []
        for generates in (False, True):
            engine = make(mesh, Decoder, 3, bucket)
            for step in range(3):
                if generates and step:
                    calls.clear()
                    with GatheredParameters(engine.module.parameters()), torch.no_grad():
                        for _ in range(20 + 4 * rank):
                            engine.module(x)
                    if calls["all_gather"] != len(engine.mechanism.buckets):
                        faults.append(f"bucket {bucket}: {calls['all_gather']} gathers for {len(engine.mechanism.buckets)} buckets")
                calls.clear()
                engine.backward(F.cross_entropy(engine(x)[0], y[0]))
                engine.step()
                if any(b.full is not None for b in engine.mechanism.buckets):
                    faults.append(f"bucket {bucket}: gathered after the step")
            results.append(whole_weights(engine))
            engine.destroy()
        if difference(*results)[0]:
            faults.append(f"bucket {bucket}: generation changed the training by {difference(*results)}")
    return faults


def test_generation_with_everything_gathered_leaves_training_as_it_is(found: list[dict[str, Any]]) -> None:
    clean(found, _gathered_once)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@torch.no_grad()
def _hint(rank: int, ranks: int) -> list[int]:
    mesh, found = one_mesh(), []

    def lengths(each: int) -> Iterator[Tensor]:
        return (torch.ones(1, each, dtype=torch.long) for _ in range(40))

    heard = Heard()
    logger.addHandler(heard)
    for stage, each in ((2, 1), (3, 4), (3, 1)):
        engine = make(mesh, Decoder, stage, optimizer=None)
        for ids in lengths(each):
            engine(ids)
        found.append(sum("GatheredParameters(model.parameters())" in line for line in heard.lines))
        engine.destroy()
    return found


def test_generation_token_by_token_is_told_of_the_remedy() -> None:
    assert run_ranks(_hint, 2, timeout=60)[0] == [0, 0, 1]


JOBS = [_calls, _tokens, _uneven, _rollout, _gathered_once]


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """All of it, in one launch of ranks."""
    return run_ranks(run_jobs, int(request.param), JOBS, timeout=240)
