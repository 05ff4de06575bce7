"""Point-to-point messages: one lane for each direction of each pair of ranks, made on first use.

Separate lanes, so that a message that is late never holds up another pair's: with one queue, rank A waiting for B could
keep C from the message that B is waiting for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeroengine.comm.fingerprint import SUBJECT_BYTES, Fingerprint, as_bytes, decode, divergence
from zeroengine.comm.lane import Lane, Operation, Watch

_HEADER_BYTES = Fingerprint.WIDTH * 8 + SUBJECT_BYTES


class PairLanes:
    """Sends and receives of one communicator. Both ends exchange a header before data moves (Gloo ends the process when
    sizes differ). A receiver that is early has said what it expects before the sender comes, and has asked for the data: so a
    message takes one way, not three."""

    def __init__(self, name: str, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, watch: Watch) -> None:
        self._name = name
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._watch = watch
        self._lanes: dict[tuple[int, int], Lane] = {}

    def send(self, tensor: Tensor, dst: int, subject: str) -> Operation:
        return self._submit(tensor, self._rank, dst, subject)

    def recv(self, tensor: Tensor, src: int, subject: str) -> Operation:
        return self._submit(tensor, src, self._rank, subject)

    def running(self) -> bool:
        return any(lane.running() for lane in self._lanes.values())

    def close(self, seconds: float) -> None:
        for lane in self._lanes.values():
            lane.close(seconds)

    def _submit(self, tensor: Tensor, src: int, dst: int, subject: str) -> Operation:
        lane = self._lanes.get((src, dst))
        peer = self._ranks[dst if src == self._rank else src]
        if lane is None:
            key = f"{self._name} {self._ranks[src]}->{self._ranks[dst]}"
            lane = self._lanes[src, dst] = Lane(key, (peer,), self._watch, None)
        mark = Fingerprint("send" if src == self._rank else "recv", subject, tensor.numel(), tensor.dtype)
        tags = _tags(src, dst, len(self._ranks))
        index = lane.issued

        def run() -> None:
            data = as_bytes(tensor) if tensor.numel() else None
            coming = None
            if data is not None and mark.kind == "recv":  # the sender sends nothing else: it looks at our header first
                coming = dist.irecv(data, peer, group=self._group, tag=tags[2])
            self._meet(mark, index, peer, tags)
            if coming is not None:
                coming.wait()
            elif data is not None:
                dist.send(data, peer, group=self._group, tag=tags[2])

        return lane.submit(mark, run)

    def _meet(self, mark: Fingerprint, index: int, peer: int, tags: tuple[int, int, int]) -> None:
        """Exchanges headers with the peer and compares all but the kind of operation."""
        header = torch.tensor(mark.header(index), dtype=torch.int64)
        text = torch.frombuffer(bytearray(mark.text()), dtype=torch.uint8)
        mine = torch.cat([header.view(torch.uint8), text])
        theirs = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        mine_tag, their_tag = (tags[0], tags[1]) if mark.kind == "send" else (tags[1], tags[0])
        works = [
            dist.isend(mine, peer, group=self._group, tag=mine_tag),
            dist.irecv(theirs, peer, group=self._group, tag=their_tag),
        ]
        for work in works:
            if work is not None:
                work.wait()
        cut = Fingerprint.WIDTH * 8
        other = theirs[:cut].clone().view(torch.int64).tolist()
        own = header.tolist()
        if [own[0], *own[2:]] != [other[0], *other[2:]]:
            me = self._ranks[self._rank]
            lines = [
                (me, decode(own, mark.text())),
                (peer, decode(other, bytes(theirs[cut:].tolist()))),
            ]
            raise divergence(self._name, me, lines)


def _tags(src: int, dst: int, size: int) -> tuple[int, int, int]:
    """Tags of the sender's header, the receiver's header and the data of one direction."""
    base = 3 * (src * size + dst) + 1
    return base, base + 1, base + 2
