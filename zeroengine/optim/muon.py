"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.logging import log_once, log_rank0
from zeroengine.ops.optimizer import evaluate
from zeroengine.zero.experts import is_stack

_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_ADAM = ("lr", "weight_decay", "betas", "eps")
_NAMES = ("embed", "lm_head")


class MuonWithAdamW(torch.optim.Optimizer):
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), by `torch.optim.Muon` for groups with
    `use_muon` true and `torch.optim.AdamW` (Adam with `adam_w_mode` false) for the others.

    Parameters of a Muon group have two dimensions or more; from three on (convolutions) they are matrices of
    (first, all others). One that is marked as a stack of experts' matrices [experts, rows, columns] is updated matrix by matrix.
    State: `momentum_buffer`; or `step`, `exp_avg`, `exp_avg_sq`.
    """

    steps_apart = True
    stacks_apart = True

    @staticmethod
    def elementwise(group: dict[str, Any]) -> bool:
        """Muon looks at matrices, AdamW at elements."""
        return not group["use_muon"]

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        adjust_lr_fn: str | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
    ) -> None:
        """`params`: groups with `use_muon` (see `split_groups`). `lr` is for both kinds unless `muon_lr` or `adam_lr` is
        given; without any, 0.02 and 3e-4. `eps` is AdamW's. Raises ValueError for values out of range."""
        self._muon_lr = next(r for r in (muon_lr, lr, 0.02) if r is not None)
        self._adam_lr = next(r for r in (adam_lr, lr, 3e-4) if r is not None)
        self._adam = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        self._inners: list[torch.optim.Optimizer] = []
        defaults: dict[str, Any] = {
            "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "weight_decay": weight_decay, "betas": betas, "eps": eps,
        }  # fmt: skip
        if ns_coefficients is not None:
            defaults["ns_coefficients"] = ns_coefficients
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`param_group` has `use_muon`; its own options win over the optimizer's. Raises ValueError as in torch."""
        if not isinstance(param_group.get("use_muon"), bool):
            raise ValueError("a parameter group of MuonWithAdamW needs use_muon: true for matrices, false for the rest")
        use = param_group["use_muon"]
        param_group.setdefault("lr", self._muon_lr if use else self._adam_lr)
        inner: torch.optim.Optimizer
        options: dict[str, Any] = {k: param_group.get(k, self.defaults.get(k)) for k in (_MUON if use else _ADAM)}
        options = {k: v for k, v in options.items() if v is not None}
        if use:
            inner = torch.optim.Muon([{"params": []}], **options)
        else:
            inner = self._adam([{"params": []}], **options)
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if use and _dimensions(p) < 2:
                self.param_groups.pop()
                raise ValueError(f"Muon is for matrices; shape {tuple(p.shape)} belongs to a group with use_muon false")
        for key in (_ADAM if use else _MUON)[2:]:
            param_group.pop(key, None)  # the other kind's options
        self._inners.append(inner)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group, inner in zip(self.param_groups, self._inners, strict=True):
            inner.state = self.state
            mine = inner.param_groups[0]
            mine.update({k: group[k] for k in (_MUON if group["use_muon"] else _ADAM) if k in group})
            folded = [p for p in group["params"] if group["use_muon"] and p.dim() > 2 and p.grad is not None]
            flat = {id(p): (_matrices if is_stack(p) else _matrix)(p, self.state) for p in folded}
            mine["params"] = [matrix for p in group["params"] for matrix in flat.get(id(p), [p])]
            inner.step()
            for p in folded:
                states = [self.state.pop(matrix) for matrix in flat[id(p)]]
                if not is_stack(p):
                    self.state[p] = states[0]
            mine["params"] = []
        return loss


def _dimensions(p: Tensor) -> int:
    """Of the parameter, or of each one of a stack."""
    return p.dim() - int(is_stack(p))


def _matrix(p: Tensor, state: Any) -> list[nn.Parameter]:
    """`p` as a matrix on the same memory, with its gradient, and with its state for the time being."""
    matrix = nn.Parameter(p.data.view(p.shape[0], -1))
    if p.grad is not None:
        matrix.grad = p.grad.view(p.shape[0], -1)
    if p in state:
        state[matrix] = state.pop(p)
    return [matrix]


def _matrices(p: Tensor, state: Any) -> list[nn.Parameter]:
    """The matrices of the stack `p`, which has a gradient, on the same memory; their momentum is a view into that of `p`."""
    grads: Tensor = p.grad  # type: ignore[assignment]
    if "momentum_buffer" not in state[p]:
        state[p]["momentum_buffer"] = torch.zeros_like(grads)
    found = []
    for values, grad, momentum in zip(p.data, grads, state[p]["momentum_buffer"], strict=True):
        matrix = nn.Parameter(values)
        matrix.grad = grad
        state[matrix] = {"momentum_buffer": momentum}
        found.append(matrix)
    return found


def split_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group as one for Muon and one for AdamW, either left out if it is empty; their options are the group's.

    Muon takes parameters of two dimensions or more (each of a stack of experts' parameters), except those of `nn.Embedding` and
    those whose name has `embed` or `lm_head` in it. A group's `use_muon`, or an attribute `use_muon` of a parameter, decides otherwise.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}

    def is_matrix(p: Tensor, group: dict[str, Any]) -> bool:
        told = getattr(p, "use_muon", group.get("use_muon"))
        if told is not None:
            return bool(told)
        name = names.get(id(p), "").lower()
        return _dimensions(p) >= 2 and id(p) not in tables and not any(word in name for word in _NAMES)

    result, counts = [], {True: 0, False: 0}
    for group in groups:
        for use in (True, False):
            params = [p for p in group["params"] if is_matrix(p, group) is use]
            counts[use] += len(params)
            if params:
                result.append({**group, "params": params, "use_muon": use})
    level = logging.INFO if counts[True] else logging.WARNING
    log_rank0(f"Muon updates {counts[True]} matrices, AdamW {counts[False]} embeddings, heads and vectors", level)
    return result


def muon_options(params: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's keys as arguments of `MuonWithAdamW`. Raises `ConfigError` for what would change the result."""
    options = dict(params)
    method = options.pop("ns_method", "standard")
    if method == "gram":
        log_once('optimizer.params.ns_method "gram": torch.optim.Muon\'s iteration is used')
    elif method != "standard":
        raise ConfigError(f'optimizer.params.ns_method is \'{method}\'; it is "standard" or "gram"')
    if options.pop("per_head_muon", False):
        raise ConfigError("optimizer.params.per_head_muon: matrices are orthogonalised whole here, which is another update; remove the key")
    return options
