"""`zero.Init`: the values of an ordinary construction, one slice of them on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

import zeroengine
from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError, ModelError
from zeroengine.zero import GatheredParameters, Init
from zeroengine.zero.held import held_by
from zeroengine.zero.residency import ReleasedParameter


class Late(nn.Module):
    """Initialises itself after its children are built, in several ways; has buffers and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5, 3))
        layers = [nn.Linear(3, 4) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(4)
        self.empty = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("table", torch.randn(3, 3))
        nn.init.normal_(self.scale)
        self.apply(self._again)
        self.scale.data[1] = self.layers[0].weight.data[0]
        with torch.no_grad():
            self.layers[2].weight.add_(self.layers[1].weight)
            self.layers[2].weight += self.layers[1].weight + self.layers[2].weight

    @staticmethod
    def _again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            nn.init.ones_(module.bias)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Linear(5, 3))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))
        self.old = old_weight_norm(nn.Conv1d(3, 2, 2))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": TinyLM, "late": Late, "normed": Normed, "recurrent": lambda: nn.LSTM(3, 5, 2),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 7), "odd": lambda: nn.Linear(1, 1),
}  # fmt: skip


def _values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model.parameters()):
        return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]) and a[name].dtype is b[name].dtype, name


def _built_as_usual(rank: int, world: int) -> None:
    for name, build in MODELS.items():
        torch.manual_seed(3)
        ordinary = build()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        with Init():
            model = build()
        assert torch.equal(torch.get_rng_state(), state), name
        held = [p for p in model.parameters() if p.numel()]
        assert held and all(isinstance(p, ReleasedParameter) for p in held), name
        for p in held:
            slot = held_by(p)
            assert slot is not None and slot.shard is not None and slot.shard.numel() == -(-p.numel() // world)
        assert [p.requires_grad for p in ordinary.parameters()] == [p.requires_grad for p in model.parameters()]
        _same(_values(ordinary), _values(model))


@pytest.mark.parametrize("world", [1, 3])
def test_the_values_of_an_ordinary_construction(world: int) -> None:
    run_ranks(_built_as_usual, world, timeout=120)


def _losses(model: nn.Module, stage: int, rank: int, **changes: Any) -> list[Any]:
    engine, *_ = zeroengine.initialize(model=model, config=config(stage, **changes))
    result: list[Any] = []
    for step in range(3):
        loss = engine(*tokens(step, 0, rank))
        engine.backward(loss)
        engine.step()
        result.append(loss.item())
    result.append(_values(engine.module))
    engine.destroy()
    return result


def _trains_as_usual(rank: int, world: int) -> None:
    # in bf16: with masters of full precision, which a cast in Init would lose
    for stage, changes in [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"bf16": {"enabled": True}})]:
        torch.manual_seed(0)
        ordinary = _losses(TinyLM(), stage, rank, **changes)
        torch.manual_seed(0)
        with Init(config_dict_or_path=config(stage)):
            model = TinyLM()
        params = list(model.parameters())
        mine = _losses(model, stage, rank, **changes)
        assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
        assert ordinary[:-1] == mine[:-1], stage
        _same(ordinary[-1], mine[-1])


@pytest.mark.parametrize("world", [2, 3])
def test_it_trains_as_usual(world: int) -> None:
    run_ranks(_trains_as_usual, world, timeout=120)


def _nested(rank: int, world: int) -> None:
    assert not dist.is_initialized()
    torch.manual_seed(1)
    expected = [_values(TinyLM()), _values(nn.Linear(3, 3)), _values(nn.Linear(2, 2)), _values(nn.Linear(3, 3))]
    torch.manual_seed(1)
    init = Init()
    with init:
        assert dist.is_initialized()
        with Init(), init, Init(enabled=False):
            first = TinyLM()
        second = nn.Linear(3, 3)
        assert held_by(second.weight) is not None
    outside = nn.Linear(2, 2)
    with init:
        third = nn.Linear(3, 3)
    assert held_by(outside.weight) is None and type(outside.weight) is nn.Parameter
    for model, values in zip((first, second, outside, third), expected, strict=True):
        _same(values, _values(model))
    with Init(enabled=False):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
    try:
        with init:
            raise KeyError("construction failed")
    except KeyError:
        pass
    assert held_by(nn.Linear(2, 2).weight) is None  # and no hook is left
    whole = nn.Linear(3, 3)
    Init(module=whole)
    assert isinstance(whole.weight, ReleasedParameter)


def test_nested_entered_again_and_before_torch_distributed() -> None:
    run_ranks(_nested, 2, timeout=90)


def _copied(rank: int, world: int) -> None:
    torch.manual_seed(0)
    with Init():
        policy = TinyLM()
    expected = _values(policy)
    reference = copy.deepcopy(policy)
    assert reference.head.weight is reference.emb.weight and reference.emb.weight is not policy.emb.weight
    assert all(isinstance(p, ReleasedParameter) or type(p) is nn.Parameter for p in reference.parameters())
    assert sum(isinstance(p, ReleasedParameter) for p in reference.parameters()) >= len(expected) - 1
    with GatheredParameters(policy.parameters(), modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                policy.emb.weight.zero_()
    _same(expected, _values(reference))
    evaluated, *_ = zeroengine.initialize(model=reference, config=config(3))
    trained, *_ = zeroengine.initialize(model=policy, config=config(3))
    trained.backward(trained(*tokens(0, 0, rank)))
    trained.step()
    _same(expected, _values(evaluated.module))


def test_a_deep_copy_is_a_reference_model_of_its_own() -> None:
    run_ranks(_copied, 2, timeout=90)


def _loaded_and_edited(rank: int, world: int) -> None:
    torch.manual_seed(5)
    source = TinyLM(tied=False)
    with Init():
        model = TinyLM(tied=False)
    model.load_state_dict(source.state_dict())
    _same(_values(source), _values(model))
    state = model.state_dict()  # names and shapes; the values come when they are asked for
    assert isinstance(model.emb.weight, ReleasedParameter) and isinstance(model.head.weight, ReleasedParameter)
    _same({n: state[n] for n in dict(source.named_parameters())}, _values(source))
    del state
    with GatheredParameters([model.head.weight, model.emb.weight], modifier_rank=1), torch.no_grad():
        if rank == 1:
            model.head.weight.fill_(2.0)
            model.emb.weight.fill_(3.0)
    assert model.blocks[0].up.weight.sum().item() == source.blocks[0].up.weight.sum().item()
    assert isinstance(model.head.weight, ReleasedParameter)
    assert (_values(model)["head.weight"] == 2).all() and (_values(model)["emb.weight"] == 3).all()
    alias = model.head.weight.data  # kept over uses of other parameters
    _ = model.emb.weight.sum(), model.blocks[1].up.bias.sum()
    alias.fill_(7.0)
    del alias
    _ = model.emb.weight.sum()
    assert (_values(model)["head.weight"] == 7).all()
    try:
        with GatheredParameters(model.head.weight), torch.no_grad():
            model.head.weight.fill_(float(rank))
    except DivergenceError as error:
        assert "Linear.weight" in str(error)
    else:
        raise AssertionError("an edit that differs between ranks passed")


def test_loaded_and_edited_before_initialize() -> None:
    run_ranks(_loaded_and_edited, 2, timeout=90)


def _resized(rank: int, world: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def build() -> nn.Module:
        torch.manual_seed(2)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2))
        model.resize_token_embeddings(17, mean_resizing=False)
        return model

    ordinary = build()
    with Init():
        model = build()
    _same(_values(ordinary), _values(model))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_embeddings_of_a_transformers_model_resized() -> None:
    run_ranks(_resized, 2, timeout=120)


def _cast_and_other_seeds(rank: int, world: int) -> None:
    torch.manual_seed(0)
    expected_lm = _values(TinyLM())
    torch.manual_seed(rank)
    with Init():
        _same(expected_lm, _values(TinyLM()))
    torch.manual_seed(0)
    expected = nn.Linear(5, 3).bfloat16()
    torch.manual_seed(0)
    with Init(dtype=torch.bfloat16):
        model = nn.Linear(5, 3)
    assert model.weight.dtype is torch.bfloat16
    _same(_values(expected), _values(model))


def test_rank_0_decides_and_a_cast_to_a_type() -> None:
    run_ranks(_cast_and_other_seeds, 3, timeout=90)


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_group"):
        Init(data_parallel_group=object())
    with pytest.raises(ConfigError, match="mpu"):
        Init(mpu=object())
    with pytest.raises(ConfigError, match="'nvme'"):
        Init(remote_device="nvme")


def _meta_module(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="'weight' is on the meta device"):
        Init(module=model)


def test_a_module_without_values_is_refused() -> None:
    run_ranks(_meta_module, 1, timeout=60)
