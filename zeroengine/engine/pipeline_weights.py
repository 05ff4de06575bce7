"""Weights and checkpoints of a pipeline: what its stages hold as one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zeroengine.checkpoint import Entry, Ranks
from zeroengine.engine.checkpointing import CheckpointMethods
from zeroengine.engine.pieces import Pieces, name_in, under_names
from zeroengine.engine.pipeline_stages import StageComms, Ties
from zeroengine.engine.state import WeightMethods, whole_parameters
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.wire import Wire
from zeroengine.zero.experts import by_name

_CPU = torch.device("cpu")


class PipelineWeightMethods(CheckpointMethods, WeightMethods):
    """Methods of `PipelineEngine` that bring weights out, and make its checkpoints those of the whole model."""

    module: PipelineModule
    _comms: StageComms
    _ties: Ties

    @property
    def _collects(self) -> bool:
        """Whether this rank's pipeline brings the weights together: one of those with the same stages does."""
        return self.mesh.ranks_along("pp")[0] == 0

    def full_state_dict(self, dtype: torch.dtype | None = None, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The state_dict of all stages in host memory on rank 0 (None elsewhere). Collective."""
        mine: dict[str, Tensor] = {}
        keep = self._collects
        params = dict(self.module.named_parameters())
        for name, value in whole_parameters(self.module, self.mechanism):
            found = by_name(params[name], name, value)
            if keep and (params[name].requires_grad or not exclude_frozen_parameters):
                cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
                mine.update({n: v.detach().to(device="cpu", dtype=cast, copy=True) for n, v in found.items()})
        if not keep:
            return None
        for prefix, child in self.module.named_modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and name not in child._non_persistent_buffers_set:
                    mine[f"{prefix}.{name}" if prefix else name] = buffer.detach().to("cpu", copy=True)
        for name, original in self.module.named_parameters(remove_duplicate=False):
            first = next((n for n, p in params.items() if p is original), name)
            if first in mine:
                mine[name] = mine[first]
        return self._collect(mine)

    def _collect(self, mine: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Brings the stages' parts to the first rank of the pipeline."""
        rank = self._comms.control.rank
        for peer in range(1, self._comms.control.size):
            if rank == peer:
                wire = Wire(self._comms.control, self._comms.control, 0, _CPU)
                wire.send("weights", _subject(peer), mine)
                wire.finish()
            elif rank == 0:
                wire = Wire(self._comms.control, self._comms.control, peer, _CPU)
                found = wire.get(wire.want("weights", _subject(peer)))
                mine = {**found, **mine}
        if rank:
            return None
        return {n: v for n, v in mine.items() if self.module.state_names_ties or not n.startswith("tied.")}

    def _weight_entries(self, dtype: torch.dtype | None, exclude_frozen: bool) -> tuple[list[Entry], dict[str, str]]:
        entries, others = super()._weight_entries(dtype, exclude_frozen)
        mine = {self._saved_name(e.name): Entry(self._saved_name(e.name), e.shape, e.dtype) for e in entries}
        stages = Ranks.of_job().phase("names of the stages' weights", lambda: (mine, self._under_saved_names(others)))
        every: dict[str, Entry] = {}
        tied: dict[str, str] = {}
        for found, names in stages:
            every.update({name: entry for name, entry in found.items() if name not in every})
            tied.update(names)
        return list(every.values()), {other: name for other, name in tied.items() if other not in every}

    def _weight_values(self) -> Iterator[tuple[str, Tensor]]:
        """The stages' weights one after the other. They go to the first rank one parameter at a time."""
        mine = ((self._saved_name(n), v) for n, v in super()._weight_values() if n not in self._ties.not_owned)
        rank = self._comms.control.rank
        if rank == 0:
            yield from mine
            if self._collects:
                for peer in range(1, self._comms.control.size):
                    yield from self._weights_from(peer)
        elif self._collects:
            wire = Wire(self._comms.control, self._comms.control, 0, _CPU)
            for name, value in mine:
                wire.send("weights", _subject(rank), {name: value.detach().to(_CPU)})
                wire.finish()  # one at a time in memory
            wire.send("weights", _subject(rank), {})
            wire.finish()
        else:
            for _ in mine:
                pass

    def _weights_from(self, peer: int) -> Iterator[tuple[str, Tensor]]:
        wire = Wire(self._comms.control, self._comms.control, peer, _CPU)
        while found := wire.get(wire.want("weights", _subject(peer))):
            yield from found.items()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _pieces_to_save(self, pieces: Pieces) -> Pieces:
        """Without the tied weights that another stage saves."""
        kept = {key: parts for key, parts in pieces.items() if name_in(key) not in self._ties.not_owned}
        return under_names(kept, self._saved_name)

    def _saved_name(self, name: str) -> str:
        return self.module.saved_name(name)

    def _under_saved_names(self, others: dict[str, str]) -> dict[str, str]:
        named = {self._saved_name(other): self._saved_name(name) for other, name in others.items()}
        return {other: name for other, name in named.items() if other != name}

    def _about(self, exclude_frozen: bool) -> dict[str, Any]:
        mine = super()._about(exclude_frozen)
        others = self._under_saved_names(mine["other_names"])
        stages = Ranks.of_job().phase("names of the stages' weights", lambda: (mine["excluded"], others))
        excluded = dict.fromkeys(self._saved_name(name) for left_out, _ in stages for name in left_out)
        return {**mine, "excluded": list(excluded), "other_names": {o: n for _, named in stages for o, n in named.items()}}


def _subject(rank: int) -> str:
    return f"weights of pipeline rank {rank}"
