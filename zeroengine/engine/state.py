"""The engine's weights for the outside world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeroengine.checkpoint import agree
from zeroengine.zero.experts import by_name
from zeroengine.zero.residency import slot_of
from zeroengine.zero.tensor import whole_value

if TYPE_CHECKING:
    from zeroengine.engine.mechanism import Mechanism
    from zeroengine.mesh import Mesh


def whole_parameters(module: nn.Module, mechanism: Mechanism) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every parameter in order of registration, one bucket gathered at a time. Collective: every rank
    must exhaust the iterator. Parts of shared layers are joined. Values are
    views that live until the next one is asked for."""
    named = list(module.named_parameters())
    position = 0
    while position < len(named):
        slot = slot_of(named[position][1])
        if slot is None:
            name, p = named[position]
            yield name, whole_value(p, p.data, name)
            position += 1
            continue
        with mechanism.sharder.gathered([slot.bucket]):
            while position < len(named):
                here = slot_of(named[position][1])
                if here is None or here.bucket is not slot.bucket:
                    break
                name, p = named[position]
                yield name, whole_value(p, p.data, name)
                position += 1


class WeightMethods:
    """Methods of `ZeroEngine` that bring weights out."""

    module: nn.Module
    mechanism: Mechanism
    mesh: Mesh

    def full_state_dict(
        self, dtype: torch.dtype | None = None, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The module's complete state_dict in host memory on rank 0 (None elsewhere); tied weights under each of their
        names share memory. Collective; one bucket is gathered at a time. `dtype` casts floating-point parameters."""
        keep = self.mesh.rank == 0
        values: dict[int, dict[str, Tensor]] = {}
        params = dict(self.module.named_parameters())
        for name, value in whole_parameters(self.module, self.mechanism):
            p = params[name]
            found = by_name(p, name, value)
            if keep and not (exclude_frozen_parameters and not p.requires_grad):
                cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
                values[id(p)] = {n: v.detach().to(device="cpu", dtype=cast, copy=True) for n, v in found.items()}
        if not keep:
            return None
        result: dict[str, Tensor] = {}
        for prefix, child in self.module.named_modules(remove_duplicate=False):
            at = prefix + "." if prefix else ""
            for name, p in child._parameters.items():
                if p is not None and id(p) in values:
                    kept = values[id(p)]  # of an expert, all ranks' of the same place
                    result.update(kept if len(kept) > 1 else {at + name: next(iter(kept.values()))})
                elif p is not None and not p.numel():
                    result[at + name] = torch.empty(p.shape, dtype=p.dtype)
            for name, b in child._buffers.items():
                if b is not None and name not in child._non_persistent_buffers_set:
                    result[at + name] = b.detach().to("cpu", copy=True)
        return result

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the complete weights in the type they are used in (`torch.load(..., weights_only=True)` reads them).
        Collective. Errors on rank 0 reach every rank."""

        state = self.full_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        path = Path(save_dir) / save_filename

        def write() -> None:
            if state is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, path)

        agree(write, f"writing {path}", self.mesh.control)
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        return self.full_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
