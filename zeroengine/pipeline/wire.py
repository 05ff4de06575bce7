"""Trees of tensors between two ranks: one message each, and its layout only when it changes.

A message is one flat buffer: tensors one after the other, and a trailer of two int64. The receiver expects the layout of
the message before on the same edge, so it can post the receive before anything was sent. If the layout is another, the
trailer says so, and a second message on a second stream brings the layout and what did not fit into the first. Values that
are no tensors belong to the layout, pickled: every micro-batch gets its own copy of what they were when they were sent.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zeroengine.comm.protocol import Communicator, Work
from zeroengine.errors import ModelError

_ALIGN = 64
MESSAGE_TRAILER = 16  # bytes


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor in a message: `offset` in bytes; `grad`: the sender's tensor requires grad."""

    shape: torch.Size
    dtype: torch.dtype
    offset: int
    grad: bool


@dataclass(frozen=True)
class Layout:
    """What a message holds: a tree whose leaves are `TensorLeaf`s or, where None stands, the next of the pickled `values`.
    `numel` is in bytes."""

    spec: TreeSpec
    leaves: tuple[TensorLeaf | None, ...]
    numel: int
    values: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        """A `TreeSpec` travels as a tree that has it: torch warns of pickled ones."""
        return _layout_like, (tree_unflatten([0] * len(self.leaves), self.spec), self.leaves, self.numel, self.values)


def _layout_like(tree: Any, leaves: tuple[TensorLeaf | None, ...], numel: int, values: bytes) -> Layout:
    return Layout(tree_flatten(tree)[1], leaves, numel, values)


class _Values(pickle.Pickler):
    """Of values that are no tensors. A tensor inside of one would lose its gradient on the way."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            raise ModelError("there is a tensor that requires grad inside of one of them, where its gradient could not come back")
        return NotImplemented


def pickled(values: list[Any], subject: str) -> bytes:
    """`values`, which go from one stage to the next, as they are now. Raises `ModelError` for what cannot go."""
    if not values:
        return b""
    text = io.BytesIO()
    try:
        _Values(text).dump(values)
    except Exception as error:
        types = ", ".join(dict.fromkeys(type(v).__name__ for v in values))
        raise ModelError(
            f"{subject}: what goes from one stage to the next consists of tensors, in tuples, lists, dicts and classes that "
            f"torch.utils._pytree knows (register_dataclass), and of values that can be pickled ({types}): {error}"
        ) from error
    return text.getvalue()


def layout_of(tree: Any, subject: str = "a message") -> tuple[Layout, list[Tensor]]:
    leaves, spec = tree_flatten(tree)
    described: list[TensorLeaf | None] = []
    tensors: list[Tensor] = []
    values: list[Any] = []
    at = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append(TensorLeaf(leaf.shape, leaf.dtype, at, leaf.requires_grad))
            tensors.append(leaf)
            at += -(-leaf.numel() * leaf.element_size() // _ALIGN) * _ALIGN
        else:
            described.append(None)
            values.append(leaf)
    return Layout(spec, tuple(described), at, pickled(values, subject)), tensors


@torch.no_grad()
def _pack(layout: Layout, tensors: list[Tensor], buffer: Tensor) -> None:
    where = [leaf for leaf in layout.leaves if leaf is not None]
    for leaf, tensor in zip(where, tensors, strict=True):
        _view(buffer, leaf).copy_(tensor.detach())


def _view(buffer: Tensor, leaf: TensorLeaf) -> Tensor:
    size = leaf.shape.numel() * leaf.dtype.itemsize
    return buffer[leaf.offset : leaf.offset + size].view(leaf.dtype).view(leaf.shape)


def _unpack(layout: Layout, buffer: Tensor) -> Any:
    values = iter(pickle.loads(layout.values) if layout.values else ())
    leaves = [_view(buffer, x).requires_grad_(x.grad) if x is not None else next(values) for x in layout.leaves]
    return tree_unflatten(leaves, layout.spec)


@dataclass
class Pending:
    """A receive: wanted, posted once its edge is free, and settled when `tree` is there."""

    edge: str
    subject: str
    buffer: Tensor | None = None
    work: Work | None = None
    tree: Any = None
    settled: bool = False

    def arrived(self) -> bool:
        return self.work is not None and self.work.done()


class Wire:
    """Both directions between this rank and one `peer` (its index in the communicators). `stream` carries messages, `extra`
    the second messages; both must keep the order of each direction."""

    def __init__(self, stream: Communicator, extra: Communicator, peer: int, device: torch.device) -> None:
        self._stream, self._extra, self._peer, self._device = stream, extra, peer, device
        self._byte = torch.empty(0, dtype=torch.uint8, device=device)
        self._sent: dict[str, Layout] = {}
        self._known: dict[str, Layout] = {}
        self._wanted: deque[Pending] = deque()
        self._posted: deque[Pending] = deque()
        self._sending: deque[Work] = deque()

    def send(self, edge: str, subject: str, tree: Any) -> None:
        """Copies the tensors of `tree` and sends them; returns at once."""
        layout, tensors = layout_of(tree, subject)
        before = self._sent.get(edge)
        space = before.numel if before is not None else 0
        first = self._stream.empty(space + MESSAGE_TRAILER, self._byte)  # read by the peer where it lies, if it can
        if layout == before:
            _pack(layout, tensors, first)
            first[space:].zero_()
            self._sending.append(self._stream.send(first, self._peer, subject))
        else:
            self._send_changed(layout, tensors, first, space, subject)
            self._sent[edge] = layout
        while self._sending and self._sending[0].done():
            self._sending.popleft().wait()

    def _send_changed(self, layout: Layout, tensors: list[Tensor], first: Tensor, space: int, subject: str) -> None:
        try:
            text = pickle.dumps(layout)
        except Exception as error:
            raise ModelError(f"{subject}: the containers of what goes from one stage to the next must be importable: {error}") from error
        payload = torch.empty(layout.numel, dtype=torch.uint8, device=self._device)
        _pack(layout, tensors, payload)
        fits = min(space, layout.numel)
        first[:fits].copy_(payload[:fits])
        first[fits:space].zero_()
        described = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        second = torch.cat([described, payload[fits:]])
        sizes = torch.tensor([second.numel(), described.numel()], dtype=torch.int64)
        first[space:].copy_(sizes.view(torch.uint8))
        self._sending.append(self._stream.send(first, self._peer, subject))
        self._sending.append(self._extra.send(second, self._peer, f"{subject} (layout)"))

    def want(self, edge: str, subject: str) -> Pending:
        """Asks for the next message; receives are asked for in the order in which the peer sends."""
        pending = Pending(edge, subject)
        self._wanted.append(pending)
        self._post()
        return pending

    def get(self, pending: Pending) -> Any:
        """The tree of a message; its tensors require grad where the sender's do. Waits for it."""
        while not pending.settled:
            self._settle(self._posted.popleft())
            self._post()
        tree, pending.tree = pending.tree, None
        return tree

    def finish(self) -> None:
        """Waits until everything that was sent has been received."""
        while self._sending:
            self._sending.popleft().wait()

    def _post(self) -> None:
        """Posts what may be posted: the size of a message is known once the one before on its edge has come. What has come
        is settled before anybody asks for it, or those behind it could only be posted when they are needed."""
        while self._posted and self._posted[0].arrived():
            self._settle(self._posted.popleft())
        while self._wanted and all(p.edge != self._wanted[0].edge for p in self._posted):
            pending = self._wanted.popleft()
            known = self._known.get(pending.edge)
            space = known.numel if known is not None else 0
            pending.buffer = torch.empty(space + MESSAGE_TRAILER, dtype=torch.uint8, device=self._device)
            pending.work = self._stream.recv(pending.buffer, self._peer, pending.subject)
            self._posted.append(pending)

    def _settle(self, pending: Pending) -> None:
        work, buffer = pending.work, pending.buffer
        pending.work = pending.buffer = None
        if work is None or buffer is None:
            raise RuntimeError(f"{pending.subject}: settled before it was posted")
        work.wait()
        space = buffer.numel() - MESSAGE_TRAILER
        total, text = buffer[space:].cpu().view(torch.int64).tolist()
        if total:
            buffer = self._receive_changed(pending, buffer[:space], total, text)
        pending.tree = _unpack(self._known[pending.edge], buffer)
        pending.settled = True

    def _receive_changed(self, pending: Pending, first: Tensor, total: int, text: int) -> Tensor:
        second = torch.empty(total, dtype=torch.uint8, device=self._device)
        self._extra.recv(second, self._peer, f"{pending.subject} (layout)").wait()
        layout: Layout = pickle.loads(bytes(second[:text].cpu().numpy()))
        self._known[pending.edge] = layout
        buffer = torch.empty(layout.numel, dtype=torch.uint8, device=self._device)
        fits = min(first.numel(), layout.numel)
        buffer[:fits].copy_(first[:fits])
        buffer[fits:].copy_(second[text:])
        return buffer
