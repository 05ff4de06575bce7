"""Batches for ranks that share sequences, out of loaders that give every rank batches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from zeroengine.errors import DivergenceError
from zeroengine.parallel.loss import IGNORED, next_token_targets

Batch = dict[str, Any]


class InTurn(IterableDataset[Batch]):
    """The batches of the ranks of `group` one after another, the same on all of them: the first of its first rank, that of its
    second rank, ..., then the second of its first rank. `part` makes of each what this rank gets.

    A batch is sent when it is its turn, so one at a time is held. All ranks must have the same number of batches, which samplers
    of accelerate and torch see to; else `DivergenceError`. Collective where it is iterated.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, device: torch.device, part: Callable[[Batch], Batch]) -> None:
        self.loader, self._group, self._device, self._part = loader, group, device, part
        self._ranks = dist.get_process_group_ranks(group)

    def __len__(self) -> int:
        return len(self.loader) * len(self._ranks)

    def set_epoch(self, epoch: int) -> None:
        """Which order the samples have, if the loader has one for each epoch."""
        sampler = getattr(getattr(self.loader, "batch_sampler", None), "batch_sampler", None)  # accelerate does not reach this one
        for tell in (getattr(each, "set_epoch", None) for each in (self.loader, sampler)):
            if tell is not None:
                tell(epoch)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self.loader)
        while True:
            mine = next(source, None)
            shapes: list[Any] = [None] * len(self._ranks)
            dist.all_gather_object(shapes, None if mine is None else _outline(mine), group=self._group)
            if all(outline is None for outline in shapes):
                return
            ended = [rank for rank, outline in zip(self._ranks, shapes, strict=True) if outline is None]
            if ended:
                raise DivergenceError(
                    f"the loaders of ranks {ended} ended before those of the other ranks of {self._ranks}, which share sequences; give "
                    "every rank the same number of batches (drop_last, or even_batches of accelerate)"
                )
            for rank, outline in zip(self._ranks, shapes, strict=True):
                yield self._part(self._broadcast(rank, outline, mine))

    def _broadcast(self, rank: int, outline: Batch, mine: Any) -> Batch:
        sent: Batch = {}
        for name, value in outline.items():
            if isinstance(value, _Shape):
                value = mine[name].to(self._device).contiguous() if rank == dist.get_rank() else value.empty(self._device)
                dist.broadcast(value, rank, group=self._group)
            sent[name] = value
        return sent


class _Shape:
    """What is known of a tensor that another rank will send."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype = tuple(tensor.shape), tensor.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)


def _outline(batch: Any) -> Batch:
    return {name: _Shape(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def whole(batch: Batch) -> Batch:
    """The batch as it is."""
    return batch


def tokens_of(rank: int, size: int) -> Callable[[Batch], Batch]:
    """Cuts batches into `size` contiguous parts along the sequence; gives the one of `rank`.

    Tensors [batch, tokens, ...] are cut. `labels` become `shift_labels`, those of the next tokens. Position ids that are missing are
    made before the cut; a length that does not divide is padded at the end with tokens that are masked and have no label.
    """

    def part(batch: Batch) -> Batch:
        made = _complete(batch, size)
        length = made["input_ids"].shape[1] // size
        ours = slice(rank * length, (rank + 1) * length)
        for name, value in made.items():
            if _has_tokens(value, size * length):
                made[name] = value[:, ours].contiguous()
        return made

    return part


def _has_tokens(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _complete(batch: Batch, size: int) -> Batch:
    ids = batch["input_ids"]
    rows, length = ids.shape[:2]
    made = dict(batch)
    if "labels" in made:
        made["shift_labels"] = next_token_targets(made.pop("labels"))
    if made.get("position_ids") is None:
        made["position_ids"] = torch.arange(length, device=ids.device)[None].expand(rows, -1)
    more = -length % size
    if not more:
        return made
    if "attention_mask" not in made:
        made["attention_mask"] = torch.ones_like(ids)
    last = made["position_ids"][:, -1:]
    fill = {"shift_labels": IGNORED}
    for name, value in made.items():
        if _has_tokens(value, length):
            tail = [0, 0] * (value.dim() - 2) + [0, more]
            made[name] = F.pad(value, tail, value=fill.get(name, 0))
    made["position_ids"][:, length:] = last + torch.arange(1, more + 1, device=ids.device)
    return made


def in_turn(loader: Any, group: dist.ProcessGroup, device: torch.device, part: Callable[[Batch], Batch] = whole) -> Any:
    """A loader over `InTurn`: one of accelerate, which it can continue in the middle of an epoch, if `loader` is one, else torch's."""
    data = InTurn(loader, group, device, part)
    if type(loader).__module__.partition(".")[0] != "accelerate":
        return DataLoader(data, batch_size=None)
    from accelerate.data_loader import DataLoaderShard

    return DataLoaderShard(data, batch_size=None, iteration=getattr(loader, "iteration", 0))
