"""The experts of one layer that this rank holds, as a bank of stacked matrices or as a list of modules.

Both hold all experts when they are made. `split` keeps the part of one rank; names do not change, so that checkpoints and
state dicts are the same whatever the number of ranks: a matrix of a bank is a part of the stacked one, and the modules of
a list are called by the experts' numbers over all ranks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from zeroengine.errors import ConfigError
from zeroengine.moe.collectives import Movement, complete, issue
from zeroengine.moe.dispatch import Route
from zeroengine.moe.group import ExpertGroup, alone
from zeroengine.moe.grouped import grouped_mlp
from zeroengine.moe.plan import invert
from zeroengine.zero.experts import ExpertPart, mark_elsewhere, mark_expert, of_all_ranks
from zeroengine.zero.leaves import MARK
from zeroengine.zero.tensor import TensorShard, mark_tensor_shard, tensor_shard, whole_value

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
}


def check_degree(number: int, ranks: int, name: str) -> None:
    """Raises `ConfigError` if so many ranks cannot hold equally many of the experts of layer `name`."""
    if number % ranks:
        raise ConfigError(f"mesh.ep {ranks} does not divide the {number} experts of '{name}'; give a divisor")


class Experts(nn.Module, ABC):
    """Base: what is computed for the rows of this rank's slots. `group` is one rank until `split`."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        if num_experts < 1:
            raise ConfigError(f"num_experts is {num_experts}; it must be at least 1")
        self.num_experts = num_experts
        self.group: ExpertGroup = alone()
        self.register_load_state_dict_pre_hook(_keep_own)

    @property
    def local(self) -> range:
        """Numbers of the experts that this rank holds."""
        per_rank = self.num_experts // self.group.size
        return range(self.group.rank * per_rank, (self.group.rank + 1) * per_rank)

    def split(self, group: ExpertGroup, subject: str = "experts") -> None:
        """Keeps this rank's experts of all. Raises `ConfigError` if the ranks cannot have equally many."""
        check_degree(self.num_experts, group.size, subject)
        self.group = group
        self._keep(self.local)
        if group.copies:  # which parameters a rank reads depends on its tokens: at stage 3 they are gathered together
            setattr(self, MARK, True)

    def forward(self, rows: Tensor, route: Route) -> Tensor:
        """[N, H] rows in order of this rank's slots to [N, out]."""
        own = len(self.local)
        borrowed = self._borrow(route)
        if borrowed is None:
            return self.own(rows, route.counts)
        here = sum(route.counts[:own])
        parts = [self.own(rows[:here], route.counts[:own]), self.borrowed(rows[here:], route.counts[own:], borrowed)]
        return torch.cat(parts)

    # --- what a kind of experts defines ---------------------------------------------------------------------------

    @abstractmethod
    def own(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Outputs of this rank's experts for their blocks of rows."""

    @abstractmethod
    def borrowed(self, rows: Tensor, counts: list[int], values: list[Tensor]) -> Tensor:
        """The same for copies of other ranks' experts, whose parameters are `values`, stacked [copies, ...]."""

    @abstractmethod
    def _stacked(self, at: list[int]) -> list[Tensor]:
        """Parameters of this rank's experts of the local numbers `at`, stacked [len(at), ...]."""

    @abstractmethod
    def _shapes(self) -> list[torch.Size]:
        """Shapes of one expert's parameters, in the order of `_stacked`."""

    @abstractmethod
    def _keep(self, local: range) -> None:
        """Lets go of the experts that are not in `local`."""

    @abstractmethod
    def join(self) -> None:
        """Holds all experts again. Collective."""

    def _alone(self) -> None:
        self.group = alone()
        self.__dict__.pop(MARK, None)

    def _borrow(self, route: Route) -> list[Tensor] | None:
        """Parameters of the copies that this rank hosts; None if no rank has any (see `ExpertGroup.always_borrows`).
        Differentiable: the copies' gradients come back to the expert's own rank and are added there. Collective."""
        placement, me = route.placement, self.group.rank
        if not placement.copied and not self.group.always_borrows:
            return None
        wanted = [placement.copies(r) for r in range(self.group.size)]
        sends = [[e - self.local.start for e in experts if e in self.local] for experts in wanted]
        receives = [0] * self.group.size
        for e in wanted[me]:
            receives[e // placement.local] += 1
        shapes = self._shapes()
        stacked = self._stacked([e for row in sends for e in row])
        flat = torch.cat([p.reshape(p.shape[0], s.numel()) for p, s in zip(stacked, shapes, strict=True)], 1)
        movement = Movement(self.group.tokens, [len(row) for row in sends], receives, "copies of experts")
        got = complete(issue(flat, movement), movement)
        # they arrive in order of their ranks; slots are in the order of the plan
        by_rank = sorted(range(len(wanted[me])), key=lambda i: wanted[me][i] // placement.local)
        got = got.index_select(0, invert(torch.tensor(by_rank, dtype=torch.long)).to(got.device))
        return [v.reshape(len(by_rank), *s) for v, s in zip(got.split([s.numel() for s in shapes], 1), shapes, strict=True)]


class StackedExperts(Experts):
    """Experts whose own parameters are stacked along dimension 0, [experts, ...]."""

    @abstractmethod
    def _compute(self, rows: Tensor, counts: list[int], values: dict[str, Tensor]) -> Tensor:
        """Outputs for the blocks of `rows` of as many experts as `values`, by name of the parameter, have stacked."""

    def own(self, rows: Tensor, counts: list[int]) -> Tensor:
        return self._compute(rows, counts, {n: p for n, p in self._parameters.items() if p is not None})

    def borrowed(self, rows: Tensor, counts: list[int], values: list[Tensor]) -> Tensor:
        return self._compute(rows, counts, dict(zip(self._parameters, values, strict=True)))

    def _stacked(self, at: list[int]) -> list[Tensor]:
        index = torch.tensor(at, dtype=torch.long)
        return [p.index_select(0, index.to(p.device)) for p in self._parameters.values() if p is not None]

    def _shapes(self) -> list[torch.Size]:
        return [p.shape[1:] for p in self._parameters.values() if p is not None]

    def _keep(self, local: range) -> None:
        cut_stacked(self, local, self.group)

    def join(self) -> None:
        join_stacked(self)
        self._alone()


class ExpertBank(StackedExperts):
    """`num_experts` two-layer networks as stacked matrices.

    With `gated` (SwiGLU for "silu") one is down(act(gate(x)) * up(x)): `gate_up_proj` [E, 2 * intermediate, hidden], gates
    first, and `down_proj` [E, hidden, intermediate]; else down(act(up(x))): `up_proj` [E, intermediate, hidden]. With `bias`
    each has one, `*_bias` [E, rows].
    """

    def __init__(
        self, num_experts: int, hidden: int, intermediate: int, activation: str = "silu", gated: bool = True,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_experts)
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation '{activation}' is not one of {', '.join(ACTIVATIONS)}")
        self.activation, self.gated = activation, gated
        self.adds_bias = True  # of ranks that split the inner dimension one adds the last bias
        self._first = "gate_up_proj" if gated else "up_proj"
        rows = 2 * intermediate if gated else intermediate
        self.register_parameter(self._first, nn.Parameter(torch.empty(num_experts, rows, hidden)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        if bias:
            self.register_parameter(f"{self._first}_bias", nn.Parameter(torch.empty(num_experts, rows)))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Linear initialises each of the matrices."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                if p is not None:
                    matrix = self._parameters[name.removesuffix("_bias")]
                    bound = (matrix if matrix is not None else p).shape[-1] ** -0.5
                    p.uniform_(-bound, bound)

    def _compute(self, rows: Tensor, counts: list[int], values: dict[str, Tensor]) -> Tensor:
        return grouped_mlp(
            rows, values[self._first], values["down_proj"], counts, self._between, values.get(f"{self._first}_bias"),
            values.get("down_proj_bias"), self.adds_bias,
        )  # fmt: skip

    def _between(self, inner: Tensor) -> Tensor:
        """From the first layer's outputs to the second one's inputs."""
        act = ACTIVATIONS[self.activation]
        if not self.gated:
            return act(inner)
        gate, up = inner.chunk(2, -1)
        return act(gate) * up


def cut_stacked(module: nn.Module, local: range, group: ExpertGroup) -> None:
    """Keeps rows `local` of the module's own parameters, which are stacked by expert."""
    for name, p in module._parameters.items():
        if p is not None:
            p.data = p.data[local.start : local.stop].clone()
            mark_expert(p, ExpertPart(group.size, group.rank, len(local) * group.size, name))
            mark_tensor_shard(p, TensorShard.over(group.tokens, 0, outer=tensor_shard(p)))


def join_stacked(module: nn.Module) -> None:
    """Undoes `cut_stacked`. Collective."""
    for name, p in module._parameters.items():
        if p is not None:
            p.data = whole_value(p, p.data, f"all experts' {name}")
            mark_expert(p, None)
            mark_tensor_shard(p, None)


class ExpertList(Experts):
    """Any modules that map [n, H] to [n, out], equal in structure. A rank runs all its experts always, also for no rows, so
    that all have gradients and all ranks do the same."""

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        given = list(experts)
        super().__init__(len(given))
        kinds = {tuple((n, p.shape, p.requires_grad) for n, p in e.named_parameters()) for e in given}
        if len(kinds) > 1:
            raise ConfigError("the experts of one layer must have parameters of the same names and shapes")
        for i, expert in enumerate(given):
            self.add_module(str(i), expert)

    def expert(self, number: int) -> nn.Module:
        """The expert of this number over all ranks; KeyError if another rank holds it."""
        module = self._modules[str(number)]
        if module is None:
            raise KeyError(str(number))
        return module

    def own(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([self.expert(e)(part) for e, part in zip(self.local, parts, strict=True)])

    def borrowed(self, rows: Tensor, counts: list[int], values: list[Tensor]) -> Tensor:
        template = self.expert(self.local.start)
        names = [n for n, _ in template.named_parameters()]
        buffers = dict(template.named_buffers())
        out = []
        for i, part in enumerate(rows.split(counts)):
            mine = {n: v[i] for n, v in zip(names, values, strict=True)}
            out.append(functional_call(template, {**buffers, **mine}, (part,)))
        if not out:  # nothing to compute, but the way back of the copies must stay in the graph
            return rows.new_empty(0, self._width(rows)) + sum(v.sum() for v in values)
        return torch.cat(out)

    def _width(self, rows: Tensor) -> int:
        with torch.no_grad():
            return int(self.expert(self.local.start)(rows[:0]).shape[1])

    def _stacked(self, at: list[int]) -> list[Tensor]:
        experts = [dict(self.expert(self.local.start + i).named_parameters()) for i in at]
        first = dict(self.expert(self.local.start).named_parameters())
        # a rank that sends none has its place in the graph all the same: the way back is collective
        return [torch.stack([e[n] for e in experts]) if at else p.unsqueeze(0)[:0] for n, p in first.items()]

    def _shapes(self) -> list[torch.Size]:
        return [p.shape for p in self.expert(self.local.start).parameters()]

    def _keep(self, local: range) -> None:
        for number in range(self.num_experts):
            if number not in local:
                for p in self.expert(number).parameters():
                    mark_elsewhere(p)
                del self._modules[str(number)]
        for number in local:
            for name, p in self.expert(number).named_parameters():
                place = f"{number - local.start}.{name}"
                mark_expert(p, ExpertPart(self.group.size, self.group.rank, self.num_experts, place, False, self.group.tokens))

    def join(self) -> None:
        mine, per_rank = list(self.local), len(self.local)
        made: dict[int, nn.Module] = {number: self.expert(number) for number in mine}
        for at, number in enumerate(mine):
            source = self.expert(number)
            others = [r * per_rank + at for r in range(self.group.size)]
            for other in others:
                if other not in made:
                    made[other] = copy.deepcopy(source)
            for name, p in source.named_parameters():
                stacked = of_all_ranks(p, p.data)
                mark_expert(p, None)
                for rank, other in enumerate(others):
                    target = made[other].get_parameter(name)
                    mark_expert(target, None)
                    target.data = stacked[rank].clone()
        self._modules.clear()
        for number in range(self.num_experts):
            self.add_module(str(number), made[number])
        self._alone()


def _keep_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict of all experts is loaded into a rank's part: keeps that part of it."""
    if isinstance(module, Experts) and module.group.size > 1:
        keep_part(module, state, prefix, module.local, module.num_experts)


def keep_part(module: nn.Module, state: dict[str, Any], prefix: str, local: range, every: int) -> None:
    for key in [k for k in state if k.startswith(prefix)]:
        head = key[len(prefix) :].partition(".")[0]
        value = state[key]
        if head.isdigit():
            if int(head) not in local:
                del state[key]
        elif head in module._parameters and isinstance(value, Tensor) and value.dim() and value.shape[0] == every:
            state[key] = value[local.start : local.stop]
