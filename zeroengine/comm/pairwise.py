"""Point-to-point messages: one lane for each direction of each pair of ranks, made on first use.

Separate lanes, so that a message that is late never holds up another pair's: with one queue, rank A waiting for B could
keep C from the message that B is waiting for. Each tag has lanes of its own, for messages with different tags may be received
in another order than they were sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroengine.comm.fingerprint import Fingerprint, as_bytes, decode_packed, divergence, header_of
from zeroengine.comm.lane import Lane, Operation, Watch
from zeroengine.comm.shared import Channel, SharedTransport
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.comm.wire import Wire

_LARGEST_TAG = 2**31 // 3 - 1  # a message over the wire has three tags, which are C integers
_LONGEST_PAUSE = 1e-3  # seconds between two looks for a message from anywhere
_ANY = -1


@dataclass
class _Line:
    """Messages of one tag from rank `src` of the group to rank `dst`, and through what (None: the wire); `moved` of them over the wire."""

    src: int
    dst: int
    tag: int
    lane: Lane
    channel: Channel | None
    moved: int = 0


class PairLanes:
    """Sends and receives of one communicator, by ranks of the group. Messages with tag 0 go through memory that both ends share
    where `shared` has a channel for them. Elsewhere both ends exchange a header over the wire before data moves (Gloo ends the
    process when sizes differ). A receiver that is early has said what it expects before the sender comes, and has asked for the data:
    so a message takes one way, not three."""

    def __init__(
        self, name: str, wire: Wire, ranks: tuple[int, ...], rank: int, watch: Watch, shared: SharedTransport | TwoLevelTransport | None
    ) -> None:
        self._name = name
        self._wire = wire
        self._ranks = ranks
        self._rank = rank
        self._watch = watch
        self._shared = shared
        self._lines: dict[tuple[int, int, int], _Line] = {}
        self._lock = threading.Lock()  # a receive from anywhere makes lines in a thread of its own

    def send(self, tensor: Tensor, dst: int, subject: str, tag: int = 0) -> Operation:
        return self._submit("send", tensor, self._line(self._rank, dst, tag), subject)

    def recv(self, tensor: Tensor, src: int, subject: str, tag: int = 0) -> Operation:
        return self._submit("recv", tensor, self._line(src, self._rank, tag), subject)

    def recv_from_any(self, tensor: Tensor, subject: str, tag: int, told: Callable[[int], None]) -> Operation:
        """Receives the first message with `tag`, whoever sent it, and tells who did. For a group in which all pairs of ranks have a
        channel or none has."""
        line = self._line(_ANY, self._rank, tag)
        mark = Fingerprint("recv", subject, tensor.numel(), tensor.dtype, _detail(tag))

        def run() -> None:
            shared = self._shared is not None and tag == 0
            told(self._take_first(tensor, subject, line.lane) if shared else self._first_over_wire(mark, tensor, tag))

        return line.lane.submit(mark, run)

    def lanes(self) -> list[Lane]:
        return [line.lane for line in list(self._lines.values())]

    def running(self) -> bool:
        return any(lane.running() for lane in self.lanes())

    def close(self, seconds: float, after: float) -> None:
        """All lanes together have `seconds` to finish, and `after` more when what they wait for in memory was given up."""
        for patience in (seconds, after):
            deadline = time.monotonic() + patience
            for lane in self.lanes():
                lane.close(max(0.0, deadline - time.monotonic()))
            for line in list(self._lines.values()):
                if line.lane.running() and line.channel is not None:  # its peer does not come
                    line.channel.interrupt()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _line(self, src: int, dst: int, tag: int) -> _Line:
        with self._lock:
            line = self._lines.get((src, dst, tag))
            if line is None:
                line = self._lines[src, dst, tag] = self._make(src, dst, tag)
            return line

    def _make(self, src: int, dst: int, tag: int) -> _Line:
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"communicator {self._name!r}: tag {tag} of a message is outside 0..{_LARGEST_TAG}")
        ends = f"{self._name} {'any' if src == _ANY else self._ranks[src]}->{self._ranks[dst]}"
        key = f"{ends}, tag {tag}" if tag else ends
        if src == _ANY:  # no rank is to blame when none has sent
            return _Line(src, dst, tag, Lane(key, (), self._watch, None), None)
        peer = self._ranks[dst if src == self._rank else src]
        channel = self._shared.channel(src, dst) if self._shared is not None and tag == 0 else None
        if channel is None:
            return _Line(src, dst, tag, Lane(key, (peer,), self._watch, None), None)
        return _Line(src, dst, tag, Lane(key, (peer,), self._watch, None, channel.interrupt, channel.stream), channel)

    def _submit(self, kind: str, tensor: Tensor, line: _Line, subject: str) -> Operation:
        mark = Fingerprint(kind, subject, tensor.numel(), tensor.dtype, _detail(line.tag))
        if line.channel is None:
            return line.lane.submit(mark, partial(self._over_wire, mark, tensor, line))
        return line.lane.submit(mark, partial(line.channel.failed, mark, tensor), line.channel.message(mark, tensor))

    def _over_wire(self, mark: Fingerprint, tensor: Tensor, line: _Line, theirs: Tensor | None = None) -> None:
        """`theirs`: the sender's header, if it has come already."""
        index, line.moved = line.moved, line.moved + 1
        peer = line.dst if mark.kind == "send" else line.src
        mine = mark.pack(index)
        from_sender, from_receiver, data = (3 * line.tag + i for i in range(3))
        mine_tag, their_tag = (from_sender, from_receiver) if mark.kind == "send" else (from_receiver, from_sender)
        receives, moving = mark.kind == "recv", tensor.numel() > 0
        # A receiver asks for the data at once: the sender looks at our header before it sends any.
        coming = self._wire.receive(as_bytes(tensor), peer, data) if receives and moving else None
        works = [self._wire.send(mine, peer, mine_tag)]
        if theirs is None:
            theirs = torch.empty(Fingerprint.PACKED, dtype=torch.uint8)
            works.append(self._wire.receive(theirs, peer, their_tag))
        for work in works:
            work.wait()
        self._compare(mine, theirs, peer)
        if coming is not None:
            coming.wait()
        elif moving:
            self._wire.send(as_bytes(tensor), peer, data).wait()

    def _compare(self, mine: Tensor, theirs: Tensor, peer: int) -> None:
        """All but the kind of operation."""
        own, other = header_of(mine), header_of(theirs)
        if [own[0], *own[2:]] != [other[0], *other[2:]]:
            me = self._ranks[self._rank]
            raise divergence(self._name, me, [(me, decode_packed(mine)), (self._ranks[peer], decode_packed(theirs))])

    def _first_over_wire(self, mark: Fingerprint, tensor: Tensor, tag: int) -> int:
        theirs = torch.empty(Fingerprint.PACKED, dtype=torch.uint8)
        src = self._wire.receive_from_any(theirs, 3 * tag)
        self._over_wire(mark, tensor, self._line(src, self._rank, tag), theirs)
        return src

    def _take_first(self, tensor: Tensor, subject: str, lane: Lane) -> int:
        """Looks at all channels in turn until one has a message, which its own lane then receives."""
        lines = [self._line(src, self._rank, 0) for src in range(len(self._ranks)) if src != self._rank]
        pause = 0.0
        while lane.error is None:
            for line in lines:
                # a lane at work has its channel for itself, and what it receives is not for us
                if line.channel is not None and line.lane.head() is None and line.channel.awaited():
                    operation = self._submit("recv", tensor, line, subject)
                    line.lane.issuer = lane.issuer  # the thread that asked, for which this one looks
                    operation.wait()
                    return line.src
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause + 1e-5)
        raise lane.error


def _detail(tag: int) -> str:
    return f"tag {tag}" if tag else ""
