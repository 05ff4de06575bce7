"""The engine's state as pieces of named tensors: what this rank holds, and which of it this rank writes.

Keys: `model.<name>` (parameters and persistent buffers as the model uses them), `master.<name>` (fp32 masters of 16-bit
parameters), `optim.<name>.<state>` (what the torch optimizer keeps for a parameter). A checkpoint made of them does not know
stages, ranks or buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.engine.mechanism import Mechanism
from zeroengine.errors import CheckpointError
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.build import Groups
from zeroengine.zero.experts import expert_part
from zeroengine.zero.layout import Piece
from zeroengine.zero.residency import slot_of

Pieces = dict[str, list[Piece]]
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Share:
    """The part that this rank writes of what several ranks hold alike: together the ranks write every element once."""

    groups: Groups

    @property
    def first(self) -> bool:
        """This rank writes what all ranks hold and nobody divides."""
        return self.groups.control.rank == 0

    def of_slice(self, bucket: Bucket) -> tuple[int, int]:
        """Elements of this rank's slice of a bucket, which its replicas hold too."""
        own, replicas = bucket.own, self.groups.of(bucket.params[0]).replicas
        lo, hi = _cut(own.stop - own.start, replicas.rank, replicas.size)
        return own.start + lo, own.start + hi

    def of_part(self, bucket: Bucket, offset: int, start: int, size: int) -> tuple[int, int]:
        """Which of the `size` elements of a part that begins at element `start` of a parameter. `offset` is the parameter's
        place in its bucket. Where state is sharded, only this rank and its replicas hold the part; elsewhere all ranks do."""
        if bucket.policy.shard_state:
            replicas = self.groups.of(bucket.params[0]).replicas
            return _cut(size, replicas.rank, replicas.size)
        at = offset + start
        lo, hi = self.of_slice(bucket)
        return min(max(lo - at, 0), size), max(min(hi - at, size), 0)

    def of_whole(self, param: nn.Parameter) -> tuple[int, int]:
        """Elements of a parameter that every rank holds whole; of an expert, every rank that has it."""
        ranks = self.groups.of(param).holders.ranks
        return _cut(param.numel(), ranks.index(self.groups.rank), len(ranks))


def _cut(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return size * rank // ranks, size * (rank + 1) // ranks


def model_pieces(module: nn.Module, mechanism: Mechanism, *, exclude_frozen: bool = False, share: Share | None = None) -> Pieces:
    """This rank's parts of parameters and buffers; with `share`, only those that it writes (buffers are rank 0's, but for
    those of experts that are not everywhere)."""
    found: Pieces = {}
    for bucket in mechanism.buckets:
        if exclude_frozen and not bucket.trainable:
            continue
        lo, hi = (bucket.own.start, bucket.own.stop) if share is None else share.of_slice(bucket)
        for spec in bucket.layout.specs:
            found[f"model.{spec.name}"] = []
        for s in bucket.layout.segments(lo, hi):
            spec, at = bucket.layout.specs[s.index], lo - bucket.own.start + s.at
            data = bucket.shard[at : at + s.end - s.start]
            found[f"model.{spec.name}"].append(Piece(spec.name, spec.shape, s.start, data))
    for name, p in module.named_parameters():
        if slot_of(p) is None and not (exclude_frozen and not p.requires_grad):
            flat = p.data.view(-1)
            lo, hi = (0, p.numel()) if share is None else share.of_whole(p)
            found[f"model.{name}"] = [Piece(name, p.shape, lo, flat[lo:hi])] if hi > lo or not p.numel() else []
    experts = _own_experts(module)
    for name, b in persistent_buffers(module):
        mine = share is None or share.first or name.startswith(experts)
        found[f"model.{name}"] = [Piece(name, b.shape, 0, b.detach().contiguous().view(-1))] if mine else []
    return found


def _own_experts(module: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names in the experts of a list that not all ranks have."""
    found = set()
    for name, p in module.named_parameters():
        part = expert_part(p)
        if part is not None and not part.stacked:
            found.add(name.removesuffix(part.place.partition(".")[2]))
    return tuple(found)


def master_pieces(optimizer: ZeroOptimizer, share: Share | None = None) -> Pieces:
    """This rank's parts of the masters that are separate from the values; with `share`, only those that it writes."""
    found: Pieces = {}
    for master in optimizer.masters:
        if not master.separate:
            continue
        offsets = {spec.name: spec.offset for spec in master.bucket.layout.specs}
        found.update({f"master.{name}": [] for name in offsets})
        for _, piece in master.pieces():
            size = piece.data.numel()
            lo, hi = (0, size) if share is None else share.of_part(master.bucket, offsets[piece.name], piece.start, size)
            if lo < hi:
                found[f"master.{piece.name}"].append(Piece(piece.name, piece.shape, piece.start + lo, piece.data[lo:hi]))
    return found


def optimizer_pieces(optimizer: ZeroOptimizer, share: Share | None = None) -> Pieces:
    """This rank's parts of what the optimizer keeps; with `share`, only those that it writes.

    A tensor of the part's own size is cut like the parameter. Others, and numbers, belong to the parameter as a whole: step
    counts, which are the same wherever a part of it is, and the factors that a whole-matrix optimizer keeps.
    """
    found: Pieces = {}
    buckets = {spec.name: (m.bucket, spec.offset) for m in optimizer.masters for spec in m.bucket.layout.specs}
    for view, piece in optimizer.held():
        size, bucket = view.numel(), buckets[piece.name]
        lo, hi = (0, size) if share is None else share.of_part(*bucket, piece.start, size)
        for key, value in optimizer.state.get(view, {}).items():
            data = _as_tensor(value, piece.name)
            if data is None:
                continue
            parts = found.setdefault(f"optim.{piece.name}.{key}", [])
            if data.dim() and data.shape == view.shape:
                if lo < hi:
                    flat = data.detach().contiguous().view(-1)[lo:hi]
                    parts.append(Piece(piece.name, piece.shape, piece.start + lo, flat))
            elif data.dim() and size != piece.shape.numel():
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of shape {tuple(data.shape)} for a piece of '{piece.name}' with {size} "
                    "elements; its place in the whole parameter is not known, so it cannot be saved"
                )
            elif not parts and (share is None or (piece.start + lo == 0 and lo < hi)):
                parts.append(Piece(piece.name, data.shape, 0, data.detach().contiguous().view(-1)))
    return found


def _as_tensor(value: Any, name: str) -> Tensor | None:
    """What an optimizer keeps as a tensor: numbers become 0-d ones; None (no momentum yet) is nothing."""
    if isinstance(value, Tensor):
        return value
    kind = _NUMBERS.get(type(value))
    if kind is not None:
        return torch.tensor(value, dtype=kind)
    if value is None:
        return None
    raise CheckpointError(
        f"the optimizer keeps a {type(value).__name__} for parameter '{name}'; a checkpoint holds tensors and numbers: keep it "
        "as one of these, or outside of the optimizer's state"
    )


def fill_optimizer(optimizer: ZeroOptimizer, wanted: Pieces, without: frozenset[str]) -> None:
    """After `wanted` (of `optimizer_pieces`) was loaded: gives numbers and step counts to every part of a parameter, and takes
    the state of the parameters in `without` away: they had none when the checkpoint was saved."""
    for view, piece in optimizer.held():
        if piece.name in without:
            optimizer.state.pop(view, None)
            continue
        state = optimizer.state.get(view, {})
        for key, value in state.items():
            if value is None:
                continue
            loaded = wanted[f"optim.{piece.name}.{key}"][0].data
            if not isinstance(value, Tensor):
                state[key] = loaded[0].item()
            elif value.dim() == 0 or value.shape != view.shape:
                value.copy_(loaded.view(value.shape))
            elif not value.is_contiguous():
                value.copy_(next(p for p in wanted[f"optim.{piece.name}.{key}"] if p.start == piece.start).data.view(value.shape))


def make_state(optimizer: ZeroOptimizer) -> list[nn.Parameter]:
    """Lets the torch optimizer create the state that is not there yet; returns the optimized tensors that had none."""
    bare = [view for view, _ in optimizer.held() if not optimizer.state.get(view)]
    optimizer.make_state()
    return bare


def name_in(key: str) -> str:
    """The parameter or buffer that a key is of."""
    kind, _, name = key.partition(".")
    return name.rpartition(".")[0] if kind == "optim" else name


def under_names(pieces: Pieces, saved_name: Callable[[str], str]) -> Pieces:
    """The same pieces under the keys of `saved_name(name)` in place of `name`."""

    def key_of(key: str) -> str:
        kind, _, rest = key.partition(".")
        name = name_in(key)
        return f"{kind}.{saved_name(name)}{rest[len(name) :]}"

    return {key_of(key): parts for key, parts in pieces.items()}


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer that belongs to the state, once, by its first name."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, b in child._buffers.items():
            if b is not None and name not in child._non_persistent_buffers_set and id(b) not in seen:
                seen.add(id(b))
                yield (f"{prefix}.{name}" if prefix else name), b


def other_names(module: nn.Module) -> dict[str, str]:
    """{other name: first name} of parameters and buffers that the module has under several names (tied weights)."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for group in (child._parameters, child._buffers):
            for name, tensor in group.items():
                if tensor is None or name in child._non_persistent_buffers_set:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                known = first.setdefault(id(tensor), full)
                if known != full:
                    found[full] = known
    return found
