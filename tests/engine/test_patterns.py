"""Ways in which models use their modules and parameters: every stage trains as one process does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.engine.versus_torch import Case, Where, check, run_cases

pytestmark = pytest.mark.ranks
D = 6


def _square(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, D)).square().mean()


# --- reuse, tying, freezing, unused parameters -------------------------------------------------------------------------


class Shared(nn.Module):
    """f(g(f(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.g(self.f(x).tanh()).tanh())


def _siamese(model: nn.Module, where: Where) -> Tensor:
    a, b = model(where.data(5, D)), model(where.data(5, D).flip(0))
    return (a * b).mean()


class Tied(nn.Module):
    def __init__(self, through_module: bool) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(7, D), nn.Linear(D, D), nn.Linear(D, 7, bias=False)
        self.through_module = through_module
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mid(self.embed(ids)).tanh()
        return self.head(h) if self.through_module else F.linear(h, self.embed.weight)


def _tokens(model: nn.Module, where: Where) -> Tensor:
    ids = where.data(4, 3).mul(100).long().remainder(7)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


class LowRank(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(D, D).to(dtype), nn.LayerNorm(D).to(dtype)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        return self.base(h).float() + self.b(self.a(h.float()))


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def _all_but_one_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    for name, p in model.named_parameters():
        p.requires_grad_(name == "2.bias")
    return model


class Unused(nn.Module):
    """`idle` never runs; `sometimes` runs when told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.sometimes = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.last, self.helper = nn.Linear(D, D), nn.Identity()

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.sometimes(x).tanh() if extra else x)


def _with_extra(when: Any) -> Any:
    def loss(model: nn.Module, where: Where) -> Tensor:
        return model(where.data(5, D), when(where)).square().mean()

    return loss


ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3, "eps": 1e-3}}

USE = [
    Case("shared", Shared, _square),
    Case("shared, accumulation", Shared, _square, accumulation=2),
    Case("siamese", lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), _siamese),
    Case("tied through the module", lambda: Tied(True), _tokens),
    Case("tied by hand", lambda: Tied(False), _tokens, accumulation=2),
    Case("low rank", lambda: Blocks([LowRank() for _ in range(3)]), _square),
    Case("low rank on bf16", lambda: Blocks([LowRank(torch.bfloat16) for _ in range(2)]), _square, tolerance=2e-5),
    Case("all but one frozen", _all_but_one_frozen, _square),
    Case("never used", Unused, _with_extra(lambda w: True), optimizer=ADAMW),
    Case("used in one step", Unused, _with_extra(lambda w: w.step == 1), steps=3, optimizer=ADAMW),
    Case("used in one micro-batch", Unused, _with_extra(lambda w: w.micro == 1), accumulation=3, optimizer=ADAMW),
    # values are whole at stages 0 to 2: there a rank may use a module alone
    Case("used on one rank", Unused, _with_extra(lambda w: w.rank == 1), optimizer=ADAMW, stages=(0, 1, 2)),
    Case("used on one rank in one bucket", Unused, _with_extra(lambda w: w.rank == 1), optimizer=ADAMW, buckets=(None,)),
    Case("used on one rank, accumulation", Unused, _with_extra(lambda w: w.rank == w.micro), accumulation=2,
         stages=(0, 1, 2)),
]  # fmt: skip


def _use(rank: int, ranks: int) -> list[str]:
    return run_cases(rank, ranks, USE)


def test_reused_tied_frozen_and_unused_parameters() -> None:
    check(_use)


# --- weights read outside their module ---------------------------------------------------------------------------------


class Outside(nn.Module):
    """Reads `a.weight` before, after or without running `a`."""

    def __init__(self, order: str, mode: str = "plain") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.order, self.mode = order, mode

    def _read(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.a.weight * self.c.weight.t()) * self.a.bias

    def _inner(self, x: Tensor) -> Tensor:
        if self.order == "before":
            return self.a(self.b(self._read(x)).tanh())
        if self.order == "after":
            return self._read(self.b(self.a(x).tanh()))
        return self._read(self.b(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "plain":
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self.mode == "reentrant")


class OwnWeightInCheckpoint(nn.Module):
    """A region that is recomputed reads a weight of the module around it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(D, D) / D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def region(h: Tensor) -> Tensor:
            return self.fc(F.linear(h, self.weight).tanh()) @ self.weight * self.gain

        return checkpoint(region, x, use_reentrant=self.reentrant)


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w * w.sum() + self.bias).tanh()


class HandsView(nn.Module):
    """Hands a view of one module's weight to others, in a region that is recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.reentrant = nn.Linear(D, D), reentrant
        self.others = nn.ModuleList([Multiplies() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        def region(h: Tensor) -> Tensor:
            w = self.a.weight.t()
            for other in self.others:
                h = other(h, w)
            return h @ w

        return checkpoint(region, self.a(x), use_reentrant=self.reentrant)


class FallsBack(nn.Module):
    """Catches an error of a child and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        def refuse(module: nn.Module, args: Any) -> None:
            raise LookupError("before the engine's own hook")

        handle = self.b.register_forward_pre_hook(refuse, prepend=True)
        try:
            x = self.b(self.a(x))
        except LookupError:
            x = F.linear(x, self.b.weight.t(), self.a.bias)
        finally:
            handle.remove()
        return self.b(x)


def _leaf_input(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, D).requires_grad_()).square().mean()


class KeepsWeight(torch.autograd.Function):
    """Keeps its weights on `ctx`, past save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        ctx.x, ctx.w, ctx.v = x, w, v
        return x @ w @ v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w, v = ctx.x, ctx.w, ctx.v
        both = torch.cat([w, v])  # two parameters in one operation
        w, v = both[:D], both[D:]
        return g @ v.t() @ w.t(), x.t() @ (g @ v.t()), (x @ w).t() @ g


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Custom(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.w, self.inside = nn.Parameter(torch.randn(D, D) / D), inside

    def forward(self, x: Tensor) -> Tensor:
        x = KeepsWeight.apply(self.a(x), self.a.weight, self.b.weight)
        return self.b(SavesWeight.apply(x.tanh(), self.w if self.inside else self.a.weight))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(D, D) / D for _ in range(3)])
        self.named = nn.ParameterDict({"gain": torch.ones(D), "shift": torch.zeros(())})
        self.one, self.odd = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(3, 5, 7))
        self.empty, self.scalar = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False] * (D // 2)))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for w in self.many:
            x = (x @ w).tanh()
        x = x * self.named["gain"] + self.named["shift"] * self.scalar + self.odd.square().mean() * self.one
        return x.masked_fill(self.mask, 0.1) + self.empty.sum()


OUTSIDE = [
    *(Case(f"outside {order} {mode}", lambda order=order, mode=mode: Outside(order, mode), _leaf_input)
      for order in ("before", "after", "without") for mode in ("plain", "reentrant", "non-reentrant")),
    *(Case(f"own weight, reentrant={r}", lambda r=r: OwnWeightInCheckpoint(r), _leaf_input) for r in (False, True)),
    *(Case(f"own weight in blocks, reentrant={r}",
           lambda r=r: Blocks([OwnWeightInCheckpoint(r) for _ in range(2)]), _leaf_input) for r in (False, True)),
    *(Case(f"custom function, own={inside}", lambda inside=inside: Custom(inside), _square, steps=3)
      for inside in (True, False)),
    *(Case(f"hands a view, reentrant={r}", lambda r=r: HandsView(r), _leaf_input) for r in (False, True)),
    Case("falls back", FallsBack, _square),
    Case("lists and odd shapes", Lists, _square, accumulation=2),
]  # fmt: skip


def _outside(rank: int, ranks: int) -> list[str]:
    return run_cases(rank, ranks, OUTSIDE)


def test_weights_read_outside_their_module() -> None:
    check(_outside)


# --- outputs, layers of torch ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    hidden: Tensor
    nothing: None = None


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(D, D), kind

    def forward(self, x: Any) -> Any:
        x = {
            "dataclass": lambda v: v.hidden, "object": lambda v: v.x, "tuple": lambda v: v[0], "dict": lambda v: v["h"][0],
        }[self.kind](x) if not isinstance(x, Tensor) else x  # fmt: skip
        h = self.fc(x).tanh()
        return {
            "dataclass": Output(h), "object": Hidden(h), "tuple": (h, None, 3), "dict": {"h": [h, None], "n": None},
        }[self.kind]  # fmt: skip


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Wraps(kind) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _unwrap(kind: str) -> Any:
    def loss(model: nn.Module, where: Where) -> Tensor:
        out = model(where.data(5, D))
        h = {"dataclass": lambda: out.hidden, "object": lambda: out.x, "tuple": lambda: out[0], "dict": lambda: out["h"][0]}
        return h[kind]().square().mean()

    return loss


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(D, 2, batch_first=True), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dim() == 3 else x.unsqueeze(0)
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = cls(D, D, num_layers=2, bidirectional=True), nn.Linear(2 * D, D)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unsqueeze(1))[0])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, D, sparse=True), nn.Linear(D, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def _conv(normed: Any) -> Any:
    def build() -> nn.Module:
        return nn.Sequential(normed(nn.Conv1d(1, 4, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(4 * (D - 2), 3))

    return build


def _signal(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, 1, D)).square().mean()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.a(x))
        h = self.b(h).add_(1.0)
        h[:, 0] = 0.0
        h += x
        return self.c(h).mul_(2.0)


class Complex(nn.Module):
    """Complex weights, used as conjugate and adjoint views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(D, D, dtype=torch.complex64) / D) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.a.conj() @ self.b.mH).abs() * self.gain


def _penalty(model: nn.Module, where: Where) -> Tensor:
    x = where.data(5, D).requires_grad_()
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


KINDS = ("dataclass", "object", "tuple", "dict")
MLP = lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))  # noqa: E731

LAYERS = [
    *(Case(f"output {k}", lambda k=k: Chain(k), _unwrap(k)) for k in KINDS),
    Case("attention", lambda: nn.Sequential(Attention(), Attention()), _square),
    Case("lstm", lambda: Recurrent(nn.LSTM), _square),
    Case("gru", lambda: Recurrent(nn.GRU), _square),
    Case("sparse embedding", Sparse, _tokens, optimizer={"type": "SGD", "params": {"lr": 0.1}}, accumulation=2),
    Case("batch norm", lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)), _square),
    Case("parametrization", _conv(nn.utils.parametrizations.weight_norm), _signal),
    Case("weight norm", _conv(nn.utils.weight_norm), _signal),
    Case("orthogonal", lambda: nn.utils.parametrizations.orthogonal(nn.Linear(D, D)), _square, tolerance=5e-6),
    Case("spectral norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)).eval(), _square),
    Case("in place", InPlace, _square),
    Case("complex", Complex, _square),
    Case("gradient penalty", MLP, _penalty),
]


def _layers(rank: int, ranks: int) -> list[str]:
    import warnings

    warnings.simplefilter("ignore")
    return run_cases(rank, ranks, LAYERS)


def test_outputs_of_any_type_and_layers_of_torch() -> None:
    check(_layers)
