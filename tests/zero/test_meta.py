"""`zero.materialize`: a model of the meta device gets values, sharded module by module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks
from tests.zero.test_init import _same, _values
from zeroengine.errors import ModelError
from zeroengine.zero import materialize
from zeroengine.zero.residency import ReleasedParameter


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return TinyLM()


def _loaded(rank: int, world: int) -> None:
    torch.manual_seed(0)
    ordinary = TinyLM()
    state = ordinary.state_dict()
    asked: list[str] = []

    def find(name: str) -> Tensor | None:
        asked.append(name)
        return state[name]

    model = materialize(_on_meta(), find)
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    assert model.head.weight is model.emb.weight and len(asked) == len(set(asked)) == len(list(model.parameters()))
    _same(_values(ordinary), _values(model))
    results = []
    for m in (ordinary, model):
        engine, *_ = zeroengine.initialize(model=m, config=config(3))
        engine.backward(engine(*tokens(0, 0, rank)))
        engine.step()
        results.append(_values(m))
    _same(*results)


def test_loaded_tensor_by_tensor() -> None:
    run_ranks(_loaded, 2, timeout=90)


def _initialised(rank: int, world: int) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    torch.manual_seed(4)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    materialize(model)
    _same(_values(plain), _values(model))
    given = torch.full((2,), 9.0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    materialize(model, {"2.bias": given})
    assert torch.equal(_values(model)["2.bias"], given) and _values(model)["2.weight"].isfinite().all()


def test_initialised_by_the_modules_themselves() -> None:
    run_ranks(_initialised, 2, timeout=90)


class _Table(nn.Module):
    def __init__(self, parameter: bool) -> None:
        super().__init__()
        if parameter:
            self.own = nn.Parameter(torch.ones(2))
        else:
            self.register_buffer("freqs", torch.arange(3.0), persistent=False)


def _refused(rank: int, world: int) -> None:
    for parameter, name in ((True, "own"), (False, "freqs")):
        with torch.device("meta"):
            model = nn.Sequential(_Table(parameter))
        with pytest.raises(ModelError, match=f"'0.{name}' of _Table is on the meta device and has no value"):
            materialize(model)
        with torch.device("meta"):
            model = nn.Sequential(_Table(parameter))
        with pytest.raises(ModelError, match="has the shape"):
            materialize(model, {f"0.{name}": torch.ones(9)})
    with pytest.raises(ModelError, match=r"zero\.materialize"):
        zeroengine.initialize(model=_on_meta(), config=config(3))


def test_what_has_no_value_is_named() -> None:
    run_ranks(_refused, 1, timeout=60)
