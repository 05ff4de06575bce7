"""Makes the ranks of a group share memory, or agrees with all of them not to.

Every step is decided by all ranks together, from what all of them said: a group never has ranks that move data in different
ways.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine.comm.arena import Arena
from zeroengine.comm.shared import SharedTransport
from zeroengine.comm.shm_native import Native, integers, made, native
from zeroengine.comm.transport import Transport
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.comm.verify import HeaderCheck
from zeroengine.comm.whereabouts import machine_id
from zeroengine.comm.wire import Wire
from zeroengine.errors import ConfigError
from zeroengine.logging import logger

ENVIRONMENT = "ZE_COMM"
_CHOICES = ("auto", "gloo")
_HALF = 1 << 20  # bytes of half a staging area: it stays in the cache from the writer to the reader, and is worth a meeting
_ADDRESS_SPACE = 16 << 40  # for the arenas of all ranks of the host; a process has 128 TiB
_SPIN = 300  # looks at a peer's word before sleeping, some microseconds: cores are short, and sleeping costs as much

Connect = Callable[[tuple[int, ...]], Wire]


@dataclass(frozen=True)
class _Offer:
    """What a rank says of itself. `reason` is empty when it can share memory. `control`: where its control block begins in
    its arena."""

    reason: str
    machine: str
    pid: int = 0
    fd: int = 0
    size: int = 0
    control: int = 0
    device: int = 0
    inode: int = 0

    _NUMBERS = struct.Struct("<6q")
    _TEXT = 160

    def pack(self) -> bytes:
        numbers = self._NUMBERS.pack(self.pid, self.fd, self.size, self.control, self.device, self.inode)
        return b"".join([numbers, *(t.encode()[: self._TEXT].ljust(self._TEXT, b"\0") for t in (self.reason, self.machine))])

    @classmethod
    def unpack(cls, data: bytes) -> _Offer:
        at = cls._NUMBERS.size
        reason, machine = (data[i : i + cls._TEXT].rstrip(b"\0").decode(errors="replace") for i in (at, at + cls._TEXT))
        return cls(reason, machine, *cls._NUMBERS.unpack(data[:at]))


@dataclass(frozen=True)
class _Mapped:
    """Why a rank could not map its peers' arenas, or nothing, and where its control blocks of messages begin."""

    reason: str
    pairs: int

    _FORM = struct.Struct("<q200s")

    def pack(self) -> bytes:
        return self._FORM.pack(self.pairs, self.reason.encode())

    @classmethod
    def unpack(cls, data: bytes) -> _Mapped:
        pairs, text = cls._FORM.unpack(data)
        return cls(text.rstrip(b"\0").decode(errors="replace"), pairs)


class SharedMemory:
    """This process' arena and the peers' arenas, for all groups of one fabric. Made on first use."""

    def __init__(self, world_size: int, budget: int = _ADDRESS_SPACE) -> None:
        """`budget`: bytes of address space for the arenas of all ranks. Raises ConfigError for a value of ZE_COMM that is none."""
        self._mode = os.environ.get(ENVIRONMENT, "").strip().lower() or "auto"
        if self._mode not in _CHOICES:
            raise ConfigError(f"{ENVIRONMENT}={self._mode}: it is one of {', '.join(_CHOICES)}")
        self._budget = budget // max(1, world_size)
        self._native: Native | None = None
        self._arena: Arena | None = None
        self._peers: dict[tuple[int, int], tuple[int, int]] = {}  # (device, inode) -> address, bytes
        self._told = False

    def transport(
        self, name: str, wire: Wire, ranks: tuple[int, ...], rank: int, connect: Connect
    ) -> SharedTransport | TwoLevelTransport | None:
        """Shared memory between the ranks that `wire` (Gloo) connects, or of each host and Gloo between hosts; or None for all
        ranks alike. `connect(ranks)` makes a Gloo group of some of them. Collective."""
        offers = [_Offer.unpack(data) for data in _gather(wire, self._offer(name).pack(), len(ranks))]
        hosts = _hosts(offers)
        reason = _objection(offers, hosts, ranks)
        mine = next(host for host in hosts if rank in host)
        place = mine.index(rank)
        bases: list[int] = []
        told: list[_Mapped] = []
        if not reason:
            bases, reason = self._map_all([offers[i] for i in mine], place)
            told = [_Mapped.unpack(data) for data in _gather(wire, _Mapped(reason, self._pairs(len(mine))).pack(), len(ranks))]
            reason = next((f"rank {r}: {said.reason}" for r, said in zip(ranks, told, strict=True) if said.reason), "")
        if reason or self._native is None or self._arena is None:
            self._tell(name, rank, reason)
            return None
        controls = integers([offers[i].control for i in mine])
        handle = made(self._native.group_new(len(mine), place, integers(bases), controls, self._arena.size, _HALF, _SPIN))
        pairs = None
        if all(said.pairs >= 0 for said in told):
            pairs = partial(_open_pair, self._native, self._arena, bases, [told[i].pairs for i in mine], place)
        inside = SharedTransport(name, self._native, self._arena, handle, tuple(ranks[i] for i in mine), place, pairs)
        if len(hosts) == 1:
            return inside
        peers = tuple(ranks[host[place]] for host in hosts)
        between = Transport(connect(peers), peers, hosts.index(mine))
        return TwoLevelTransport(Transport(wire, ranks, rank), inside, between, HeaderCheck(name, wire, ranks, rank))

    def bytes(self) -> int:
        """Bytes of this process' arena that are in use or kept for the next tensor."""
        return self._arena.bytes() if self._arena is not None else 0

    def close(self) -> None:
        """When no group is in use any more. Tensors that live on keep their memory."""
        library, arena, self._arena = self._native, self._arena, None
        if library is None or arena is None:
            return
        while self._peers:
            library.unmap(*self._peers.popitem()[1])
        arena.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _offer(self, name: str) -> _Offer:
        reason = self._ready()
        native, arena = self._native, self._arena
        if reason or arena is None or native is None:
            return _Offer(reason, machine_id())
        control = arena.reserve(native.control_bytes(_HALF))
        if control is None:
            return _Offer(f"no room for communicator {name!r} in {arena.size >> 20} MiB", machine_id())
        native.control_clear(arena.base + control)
        file = os.fstat(arena.fd)
        return _Offer("", machine_id(), os.getpid(), arena.fd, arena.size, control, file.st_dev, file.st_ino)

    def _pairs(self, places: int) -> int:
        """Where the control blocks of messages to and from each place of this host begin; -1 if there is no room for them."""
        if self._native is None or self._arena is None:
            return -1
        each = self._native.control_bytes(_HALF)
        start = self._arena.reserve(2 * places * each, counted=False)
        if start is None:
            return -1
        for at in range(start, start + 2 * places * each, each):
            self._native.control_clear(self._arena.base + at)
        return start

    def _ready(self) -> str:
        """Makes the arena; why there is none, or nothing."""
        if self._arena is not None:
            return ""
        if self._mode != "auto":
            return f"{ENVIRONMENT}={self._mode}"
        if not machine_id():
            return "there is no /proc"
        found = native()
        if isinstance(found, str):
            return found
        try:
            self._native, self._arena = found, Arena(found, self._budget)
        except OSError as error:
            return str(error)
        return ""

    def _map_all(self, offers: list[_Offer], rank: int) -> tuple[list[int], str]:
        """Addresses of all arenas in this process, or why one cannot be mapped."""
        if self._native is None or self._arena is None:
            return [], "no arena"
        bases = []
        for index, offer in enumerate(offers):
            if index == rank:
                bases.append(self._arena.base)
                continue
            try:
                bases.append(self._map(self._native, offer))
            except OSError as error:
                return [], f"the memory of process {offer.pid} cannot be mapped: {error.strerror or error}"
        return bases, ""

    def _map(self, library: Native, offer: _Offer) -> int:
        known = self._peers.get((offer.device, offer.inode))
        if known is not None:
            return known[0]
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            file = os.fstat(fd)
            if (file.st_dev, file.st_ino) != (offer.device, offer.inode):
                raise OSError(f"/proc/{offer.pid}/fd/{offer.fd} is another file")
            at = int(library.map(fd, offer.size, 1))
        finally:
            os.close(fd)
        if at <= 0:
            raise OSError(-at, os.strerror(-at))
        self._peers[offer.device, offer.inode] = (at, offer.size)
        return at

    def _tell(self, name: str, rank: int, reason: str) -> None:
        if self._told or rank != 0:
            return
        self._told = True
        level = logger.debug if reason.endswith(f"{ENVIRONMENT}=gloo") else logger.info
        level(f"communicator {name!r} moves data over Gloo: {reason}")


def _open_pair(native: Native, arena: Arena, bases: list[int], pairs: list[int], place: int, src: int, dst: int) -> int:
    """The native group for messages from place `src` to place `dst`. A rank's blocks lie by peer: what goes out, what comes in."""
    each = native.control_bytes(_HALF)
    if place == src:
        arena.count(each)
    controls = integers([pairs[src] + 2 * dst * each, pairs[dst] + (2 * src + 1) * each])
    ends = integers([bases[src], bases[dst]])
    return made(native.group_new(2, int(place == dst), ends, controls, arena.size, _HALF, _SPIN))


def _hosts(offers: list[_Offer]) -> list[list[int]]:
    """Places in the group by host, in the order in which hosts come."""
    found: dict[str, list[int]] = {}
    for place, offer in enumerate(offers):
        found.setdefault(offer.machine, []).append(place)
    return list(found.values())


def _objection(offers: list[_Offer], hosts: list[list[int]], ranks: tuple[int, ...]) -> str:
    """Why these ranks cannot share memory, in the same words on every rank; nothing when they may try."""
    for rank, offer in zip(ranks, offers, strict=True):
        if offer.reason:
            return f"rank {rank}: {offer.reason}"
    if len(hosts) == 1:
        return ""
    each = len(hosts[0])
    if each == 1:
        return f"ranks {ranks[0]} and {ranks[hosts[1][0]]} do not run on one host"
    even = all(host == list(range(at * each, (at + 1) * each)) for at, host in enumerate(hosts))
    if not even or each & (each - 1):
        shares = ", ".join(str([ranks[i] for i in host]) for host in hosts)
        return f"sums in a fixed order need the same power of two of consecutive ranks on every host, and they have {shares}"
    return ""


def _gather(wire: Wire, own: bytes, size: int) -> list[bytes]:
    rows = torch.empty(size * len(own), dtype=torch.uint8)
    wire.all_gather(rows, torch.frombuffer(bytearray(own), dtype=torch.uint8))
    data = bytes(rows.tolist())
    return [data[i : i + len(own)] for i in range(0, len(data), len(own))]
