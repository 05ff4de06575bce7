"""A tensor of which this rank holds some boxes, in the form that `torch.distributed.checkpoint` saves and loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroengine.checkpoint.rectangles import rectangles
from zeroengine.errors import CheckpointError
from zeroengine.zero.layout import Piece
from zeroengine.zero.tensor import place


@dataclass(frozen=True)
class Box:
    """The part of a tensor at `offsets`; `data` has the box's shape and shares the memory of the piece it lies in."""

    offsets: tuple[int, ...]
    data: Tensor


class ShardedTensorView(Tensor):
    """Stands for a whole tensor of `shape` of which only `boxes` are here. It has no values of its own.

    It answers the three calls that torch's checkpointing makes on objects that describe their own shards
    (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), so that the stock planners, reader and
    writer serve it like a DTensor: what is saved loads into any other set of boxes, or into a plain tensor.
    """

    _boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, boxes: Sequence[Box]) -> ShardedTensorView:
        view: ShardedTensorView = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        view._boxes = tuple(boxes)
        return view

    @staticmethod
    def of_pieces(key: str, pieces: Sequence[Piece]) -> ShardedTensorView:
        """Describes the tensor saved as `key` by this rank's `pieces` of it (at least one, checked here).

        Raises CheckpointError if the pieces disagree in shape, dtype or device, overlap, or leave the tensor.
        """
        _check(key, pieces)
        head = pieces[0]
        boxes: dict[tuple[int, ...], Box] = {}
        if math.prod(head.shape) == 0:  # no elements, so no rectangle, but the name and the shape must be kept
            boxes[(0,) * len(head.shape)] = Box((0,) * len(head.shape), head.data.detach().new_empty(head.shape))
        for piece in pieces:
            for offsets, sizes, at in rectangles(piece.shape, piece.start, piece.start + piece.data.numel()):
                box = _alias(piece.data, at, sizes)
                for there, held in [(offsets, box)] if piece.part is None else place(piece.part, piece.shape, offsets, box):
                    boxes[there] = Box(there, held)
        shape = head.shape if head.part is None else head.part.whole_shape(head.shape)
        return ShardedTensorView(shape, head.data.dtype, head.data.device, list(boxes.values()))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for box, chunk in zip(self._boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), box.data.shape) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: a box of a sharded tensor is looked up by its offsets")
        # The hint may count the chunks of all ranks (it does when saving), so it is only believed when it fits.
        if index.index is not None and index.index < len(self._boxes):
            box = self._boxes[index.index]
            if box.offsets == tuple(index.offset):
                return box.data
        for box in self._boxes:
            if box.offsets == tuple(index.offset):
                return box.data
        raise ValueError(f"{index.fqn}: this rank holds no box at {tuple(index.offset)}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = ", ".join(f"{tuple(b.data.shape)}@{b.offsets}" for b in self._boxes)
        return f"ShardedTensorView(shape={tuple(self.shape)}, dtype={self.dtype}, boxes=[{held}])"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: a ShardedTensorView has no values here; it is only for saving and loading")


def _check(key: str, pieces: Sequence[Piece]) -> None:
    head = pieces[0]
    numel, end_before = math.prod(head.shape), 0
    for piece in sorted(pieces, key=lambda p: (p.start, p.data.numel())):
        end = piece.start + piece.data.numel()
        if tuple(piece.shape) != tuple(head.shape):
            raise CheckpointError(f"{key}: pieces of shapes {tuple(head.shape)} and {tuple(piece.shape)} on one rank")
        if piece.data.dtype != head.data.dtype or piece.data.device != head.data.device:
            raise CheckpointError(
                f"{key}: pieces on one rank differ: {head.data.dtype} on {head.data.device}, {piece.data.dtype} on {piece.data.device}"
            )
        if piece.data.dim() != 1 or not piece.data.is_contiguous():
            raise CheckpointError(f"{key}: the data of a piece must be 1-D and contiguous, not {piece.data.shape}")
        if piece.start < 0 or end > numel:
            raise CheckpointError(f"{key}: a piece holds elements [{piece.start}, {end}) of a tensor with {numel}")
        if piece.start < end_before:
            raise CheckpointError(f"{key}: two pieces on one rank both hold element {piece.start}")
        end_before = end


def _alias(data: Tensor, at: int, sizes: Sequence[int]) -> Tensor:
    """Elements [at, at + prod(sizes)) of 1-D `data` as a tensor of `sizes` on the same memory.

    On the CPU the result's storage is exactly its bytes: torch's writer clones a tensor that lies in a larger storage
    and keeps the clones until its file is closed, which would double the memory of a rank's state while saving.
    """
    part = data.detach()[at : at + math.prod(sizes)]
    if part.device.type != "cpu":
        return part.view(tuple(sizes))
    first = part.storage_offset() * part.element_size()
    storage = part.untyped_storage()[first : first + part.numel() * part.element_size()]
    whole = torch.empty(0, dtype=data.dtype).set_(storage, 0, (part.numel(),), (1,))
    return whole.view(tuple(sizes))
