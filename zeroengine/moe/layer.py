"""`MoE`: a mixture of experts in place of a feed-forward layer."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.moe.capacity import Capacity, Priority
from zeroengine.moe.dispatch import Dispatcher
from zeroengine.moe.experts import ExpertList, Experts
from zeroengine.moe.group import ExpertGroup, alone
from zeroengine.moe.router import Noise, Router, RouterRule
from zeroengine.moe.statistics import Statistics
from zeroengine.zero.hooks import in_backward

_NOISES: dict[str | None, Noise] = {None: "none", "None": "none", "none": "none", "Jitter": "jitter", "RSample": "gumbel"}


class SparseLayer(Protocol):
    """What the engine asks of a layer with experts: `SparseExperts`, or the experts of a transformers block."""

    @property
    def held(self) -> Experts: ...

    @property
    def statistics(self) -> Statistics: ...

    def spread(self, group: ExpertGroup, subject: str) -> None: ...

    def gather(self) -> None: ...

    def balances(self, speed: float) -> bool: ...

    def balance(self, load: Tensor, speed: float) -> None: ...


class SparseExperts(nn.Module):
    """A router, its experts and, beside them, a `shared` expert [..., H] -> [..., H] that all tokens pass, whose time hides the dispatch.

    Alone it is an ordinary module on one rank. `zeroengine.initialize` spreads the experts over `mesh.ep` ranks and lets the
    router see the global batch.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ConfigError(f"a router for {router.num_experts} experts and a layer of {experts.num_experts}; give both the same number")
        self.router, self.experts, self.shared = router, experts, shared
        self._dispatcher = Dispatcher(alone(), experts.num_experts, "experts")

    @property
    def held(self) -> Experts:
        return self.experts

    @property
    def statistics(self) -> Statistics:
        return self.router.statistics

    def spread(self, group: ExpertGroup, subject: str) -> None:
        """Keeps this rank's experts, if several share them. Tokens are those of all ranks of `group.batch` from now on.
        `subject` names the layer."""
        if group.size > 1:
            self.experts.split(group, subject)
        self._dispatcher = Dispatcher(group, self.experts.num_experts, subject)
        self.router.group, self.router.subject = group, subject

    def gather(self) -> None:
        """Holds all experts and is alone again. Collective."""
        if self.experts.group.size > 1:
            self.experts.join()
        self._dispatcher = Dispatcher(alone(), self.experts.num_experts, "experts")
        self.router.group = alone()

    def balances(self, speed: float) -> bool:
        """Whether the router has a bias that `balance` moves, by its own speed."""
        return self.router.bias is not None

    def balance(self, load: Tensor, speed: float) -> None:
        self.router.move_bias(load)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden` [..., H] to (outputs [..., H], the router's loss, assignments of each expert [E] in all of the group's tokens
        after drops). Collective."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing = self.router(tokens)
        route = self._dispatcher.route(routing.index, routing.keep)
        flight = self._dispatcher.send(tokens, route)
        beside = None if self.shared is None else self.shared(hidden)
        rows = self.experts(flight.land(), route)
        if self.training and not in_backward():
            self.router.statistics.computed += sum(route.counts)
        out = self._dispatcher.combine(rows, route, routing.weights)
        out = out.view(*hidden.shape[:-1], out.shape[-1])
        return out if beside is None else out + beside, routing.loss, route.load


class MoE(nn.Module):
    """DeepSpeed's mixture-of-experts layer: `num_experts` copies of `expert`, or experts of your own, and a router.

    `expert` is a module [n, hidden_size] -> [n, hidden_size], copied for each expert, or an `Experts` (`ExpertBank` is faster
    than many modules). Calling gives (outputs, loss of the router, assignments of each expert).

    `k`, any number; `capacity_factor`, `eval_capacity_factor`, `min_capacity` and `drop_tokens` bound what an expert takes,
    counted over the global batch; `use_rts` drops at random instead of by position, `priority` says it in full.
    `noisy_gate_policy`: None, "Jitter" or "RSample". `use_residual`: outputs are a learned mix with a dense `expert` (Rajbhandari et al.,
    2022). With k > 1 weights are divided by their sum. `rule` replaces all that concerns the router. `shared`: an expert that all
    tokens pass, in the shape in which the layer is given them. `ep_size`: ranks that share the experts if the configuration does
    not say (`mesh.ep`). `use_tutel` and `enable_expert_tensor_parallelism` are accepted and have no effect on the result.
    """

    def __init__(
        self, hidden_size: int, expert: nn.Module | Experts, num_experts: int = 1, ep_size: int = 1, k: int = 1,
        capacity_factor: float = 1.0, eval_capacity_factor: float = 1.0, min_capacity: int = 4, use_residual: bool = False,
        noisy_gate_policy: str | None = None, drop_tokens: bool = True, use_rts: bool = True, use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False, top2_2nd_expert_sampling: bool = False, *,
        priority: Priority | None = None, rule: RouterRule | None = None, shared: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if noisy_gate_policy not in _NOISES:
            raise ConfigError(f"noisy_gate_policy '{noisy_gate_policy}' is not None, 'Jitter' or 'RSample'")
        if rule is None:
            order: Priority = priority or ("random" if use_rts and k == 1 else "position")
            capacity = Capacity(capacity_factor, eval_capacity_factor, min_capacity, order) if drop_tokens else None
            noise: Noise = "gumbel" if top2_2nd_expert_sampling and k == 2 else _NOISES[noisy_gate_policy]
            rule = RouterRule(k=k, normalize=k > 1, noise=noise, capacity=capacity)
        self.ep_size = ep_size
        self.num_experts = expert.num_experts if isinstance(expert, Experts) else num_experts
        if isinstance(expert, Experts):
            experts: Experts = expert
        else:
            experts = ExpertList(copy.deepcopy(expert) for _ in range(num_experts))
        self.sparse = SparseExperts(Router(hidden_size, self.num_experts, rule), experts, shared)
        self.dense: nn.Module | None = None
        self.mix: nn.Linear | None = None
        if use_residual:
            if isinstance(expert, Experts):
                raise ConfigError("use_residual needs `expert` as a module, of which the dense one is a copy")
            self.dense = copy.deepcopy(expert)
            self.mix = nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden_states` [..., hidden_size]. Raises `ConfigError` for `used_token`, a mask that DeepSpeed has for top-1 only."""
        if used_token is not None:
            raise ConfigError("used_token: leave out the tokens that are not used, any number of tokens is allowed")
        out, loss, load = self.sparse(hidden_states)
        if self.dense is not None and self.mix is not None:
            parts = self.mix(hidden_states).softmax(-1)
            out = out * parts[..., 0:1] + self.dense(hidden_states) * parts[..., 1:]
        return out, loss, load


def sparse_layers(model: nn.Module) -> dict[str, SparseExperts]:
    """The layers of `model` with experts, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseExperts)}


def declared_degree(model: nn.Module) -> int:
    """The number of ranks that the model's own layers want to share experts, 1 if none says. Raises `ConfigError` if they
    disagree."""
    wanted = {m.ep_size for m in model.modules() if isinstance(m, MoE)}
    if len(wanted - {1}) > 1:
        raise ConfigError(f"the MoE layers of the model have different ep_size ({sorted(wanted)}); give all the same")
    return max(wanted, default=1)


__all__ = ["MoE", "SparseExperts", "SparseLayer", "declared_degree", "sparse_layers"]
