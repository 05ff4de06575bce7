"""Mixtures of experts of Hugging Face transformers, spread over ranks in place.

In transformers 5 every such block has a router and a module `experts` with the matrices of all experts stacked, called with
(hidden states, indices, weights). That module is exchanged for one that holds this rank's part of the same parameters under
the same names and moves the tokens. Router and shared experts stay the model's own code, and so does the block, unless its
shared experts can run while tokens travel (`hf_shared`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroengine.errors import ModelError
from zeroengine.moe.collectives import sum_over_ranks
from zeroengine.moe.dispatch import Dispatcher
from zeroengine.moe.experts import Experts, StackedExperts
from zeroengine.moe.group import Batch, ExpertGroup, alone
from zeroengine.moe.grouped import grouped_mlp
from zeroengine.moe.hf_shared import overlap, restore
from zeroengine.moe.router import move_against
from zeroengine.moe.statistics import Statistics
from zeroengine.zero.hooks import in_backward

_ARGUMENTS = [{"hidden_states"}, {"top_k_index", "router_indices"}, {"top_k_weights", "routing_weights"}]
_MATRICES = {"gate_up_proj", "down_proj"}
_BIAS = "e_score_correction_bias"
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def is_stacked_experts(module: nn.Module) -> bool:
    """Whether `module` is the experts of a transformers block: stacked parameters, and the usual call."""
    number = getattr(module, "num_experts", None)
    if not isinstance(number, int) or isinstance(module, Experts):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    stacked = bool(own) and all(p.dim() > 1 and p.shape[0] == number for p in own)
    nested = any(True for child in module.children() for _ in child.parameters())
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    usual = len(taken) == len(_ARGUMENTS) and all(name in names for name, names in zip(taken, _ARGUMENTS, strict=True))
    return stacked and not nested and usual


def _is_plain(module: nn.Module) -> bool:
    """Its mathematics is that of two grouped matrices and the module's own gate."""
    odd = any(getattr(module, name, False) for name in ("is_transposed", "has_bias", "has_post_expert_norm"))
    return set(module._parameters) == _MATRICES and getattr(module, "has_gate", False) and not odd and hasattr(module, "_apply_gate")


class SharedStackedExperts(StackedExperts):
    """Stands in a block for its `original` experts, whose parameters it has under the same names."""

    def __init__(self, original: nn.Module, router: nn.Module | None) -> None:
        number = original.num_experts
        super().__init__(int(number))  # type: ignore[arg-type]
        self._original = (original,)  # in a tuple it is no submodule: its parameters are ours
        self._router = (router,)
        self.is_plain = _is_plain(original)
        self._dispatcher = Dispatcher(alone(), self.num_experts, "experts")
        self.statistics = Statistics(self.num_experts)
        for name, p in original._parameters.items():
            self.register_parameter(name, p)
        for name, b in original._buffers.items():
            self.register_buffer(name, b, persistent=name not in original._non_persistent_buffers_set)
        for name in _HOOKS:  # the same ones, as the borders of a tensor group; whoever made them can remove them
            setattr(self, name, getattr(original, name))

    @property
    def original(self) -> nn.Module:
        return self._original[0]

    def between(self, inner: Tensor) -> Tensor:
        """From the first layer's outputs to the second one's inputs, where `is_plain`."""
        out: Tensor = self.original._apply_gate(inner)  # type: ignore[operator]
        return out

    @property
    def bias(self) -> Tensor | None:
        """The buffer by which the router balances without a loss (DeepSeek-V3)."""
        found = getattr(self._router[0], _BIAS, None)
        return found if isinstance(found, Tensor) else None

    @property
    def held(self) -> Experts:
        return self

    def spread(self, group: ExpertGroup, subject: str) -> None:
        """As `SparseExperts.spread`."""
        if group.size > 1:
            self.split(group, subject)
        self._dispatcher = Dispatcher(group, self.num_experts, subject)

    def gather(self) -> None:
        """As `SparseExperts.gather`."""
        if self.group.size > 1:
            self.join()
        self._dispatcher = Dispatcher(alone(), self.num_experts, "experts")

    def balances(self, speed: float) -> bool:
        return speed > 0 and self.bias is not None

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """[T, H], [T, k], [T, k] to [T, H]. `beside` is called while tokens travel. Collective."""
        route = self._dispatcher.route(top_k_index)
        self.statistics.record(self._dispatcher.group.batch.tokens(top_k_index), None, None, self.training)
        if self.training and not in_backward():
            self.statistics.computed += sum(route.counts)
        flight = self._dispatcher.send(hidden_states, route)
        if beside is not None:
            beside()
        rows = super().forward(flight.land(), route)
        return self._dispatcher.combine(rows, route, top_k_weights)

    def _compute(self, rows: Tensor, counts: list[int], values: dict[str, Tensor]) -> Tensor:
        if self.is_plain:
            return grouped_mlp(rows, values["gate_up_proj"], values["down_proj"], counts, self.between)
        if not rows.shape[0]:  # its own code need not know of no rows; the parameters stay in the graph
            return rows * sum((p.sum() for p in values.values()), rows.new_zeros(()))
        index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(rows.device).unsqueeze(1)
        before = self.original.num_experts
        self.original.num_experts = len(counts)  # type: ignore[assignment]
        try:
            out: Tensor = functional_call(self.original, values, (rows, index, torch.ones_like(index, dtype=rows.dtype)))
        finally:
            self.original.num_experts = before
        return out

    def balance(self, load: Tensor, speed: float) -> None:
        """As `Router.move_bias`."""
        if self.bias is not None:
            move_against(self.bias, load, speed)


def convert(model: nn.Module) -> dict[str, SharedStackedExperts]:
    """Exchanges the experts of all blocks of `model`; returns the new modules by name. They hold all experts until `split`."""
    found: dict[str, SharedStackedExperts] = {}
    for name, module in list(model.named_modules()):
        if name and is_stacked_experts(module):
            outer, _, last = name.rpartition(".")
            block = model.get_submodule(outer)
            router = next((m for m in block.children() if getattr(m, _BIAS, None) is not None), None)
            if router is not None:
                router.fp32_buffers = (_BIAS,)  # type: ignore[assignment]
            found[name] = SharedStackedExperts(module, router)
            found[name].train(module.training)
            setattr(block, last, found[name])
            overlap(block)
    return found


def revert(model: nn.Module, converted: dict[str, SharedStackedExperts]) -> None:
    """Puts the original modules back. They must hold all experts again (`join`)."""
    for name, module in converted.items():
        outer, _, last = name.rpartition(".")
        block = model.get_submodule(outer)
        module.original.train(module.training)
        restore(block)
        setattr(block, last, module.original)


class GlobalRouterLoss:
    """Makes the router loss that a transformers model adds to its own that of the whole batch: the model computes it from the
    tokens of one rank, and the mean of products over ranks is not the product of means."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._batch = batch
        self._handle = model.register_forward_hook(self, with_kwargs=True)

    @staticmethod
    def applies(model: nn.Module) -> bool:
        return all(hasattr(model, n) for n in ("router_aux_loss_coef", "num_experts", "num_experts_per_tok"))

    def remove(self) -> None:
        self._handle.remove()

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str:
        return "_nothing"  # a pickle of the model is a plain one

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        before = getattr(output, "aux_loss", None)
        if not isinstance(before, Tensor) or not logits:
            if isinstance(output, tuple) and (kwargs.get("output_router_logits") or model.config.output_router_logits):
                raise ModelError("a router loss over several ranks needs the model's output as an object: leave out return_dict=False")
            return
        loss = self._global(model, logits, self._batch.valid_rows(kwargs.get("attention_mask"), logits[0].shape[0]))
        if getattr(output, "loss", None) is not None:
            output.loss = output.loss + model.router_aux_loss_coef * (loss - before).to(output.loss.device)
        output.aux_loss = loss

    def _global(self, model: Any, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """E * sum over experts of (assignments per token) * (mean probability), over all layers' tokens together."""
        experts, k = model.num_experts, model.num_experts_per_tok
        load = torch.zeros(experts, device=logits[0].device)
        mass = torch.zeros_like(load)
        rows = torch.zeros(1, device=logits[0].device)
        for layer in logits:
            shares = layer.float().softmax(-1)
            weight = shares.new_ones(shares.shape[0]) if mask is None else mask.to(shares)
            chosen = shares.detach().topk(k, -1)[1].reshape(-1)
            load = load.scatter_add(0, chosen, weight.repeat_interleave(k))
            mass = mass + (shares * weight[:, None]).sum(0)
            rows = rows + weight.sum()
        sums = sum_over_ranks(torch.cat([load, mass, rows]), self._batch.ranks, self._batch.averaged, "sums of the router loss")
        load, mass, rows = sums.split([experts, experts, 1])
        rows = rows.detach().clamp_min(1.0)
        return (load.detach() / rows * (mass / rows)).sum() * experts


def _nothing(*_: Any) -> None:
    """In a copy of the model, which belongs to no engine."""
