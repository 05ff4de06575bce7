"""Where each bucket's values, masters and optimizer state live between uses: the one place that knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.offload.buffers import Allocate, Buffers, disk_bytes, pinned_bytes
from zeroengine.offload.faults import Faults
from zeroengine.offload.folder import RankFolder
from zeroengine.offload.home import Home, Memory
from zeroengine.offload.link import DeviceLink, on_host
from zeroengine.offload.parked import Parked
from zeroengine.offload.store import DiskStore
from zeroengine.ops.aio import FileIO, file_io

Tier = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class OffloadRule:
    """Where one kind of state lives: `none` is the device that computes.

    `ratio`: share of it that leaves the device, in whole buckets. `resident`: elements that stay in host memory though the
    tier is `nvme`. `claim`: the disk's space is claimed at the start.
    """

    tier: Tier = "none"
    folder: str | None = None
    pin: bool = True
    buffers: int = 4
    ratio: float = 1.0
    resident: int = 0
    read_ahead: bool = True
    write_behind: bool = True
    claim: bool = True


@dataclass(frozen=True)
class FileRule:
    """How files are accessed: `requests` blocks of `block` bytes in flight."""

    block: int = 1 << 20
    requests: int = 8


class Places:
    """What the rules decide, bucket by bucket in order, without doing it. `device`: the one that computes."""

    def __init__(self, device: torch.device, state: OffloadRule, values: OffloadRule) -> None:
        self.device = device
        self.state_rule, self.values_rule = state, values
        self._seen = self._moved = self._resident = 0  # elements

    def keeps_values(self, numel: int) -> bool:
        """Whether the next shard, of `numel` elements, stays in memory. Once for each, in order."""
        self._resident += numel
        return self.values_rule.tier != "nvme" or self._resident <= self.values_rule.resident

    def moves_state(self, numel: int) -> bool:
        """Whether the state of the next bucket, of `numel` elements, leaves the device. Once for each, in order."""
        rule = self.state_rule
        self._seen += numel
        away = rule.tier != "none" and self._moved + numel / 2 <= rule.ratio * self._seen
        self._moved += numel if away else 0
        return away

    @property
    def values_on_host(self) -> bool:
        """Sharded values of an accelerator live on the host or beyond."""
        return self.device.type != "cpu" and self.values_rule.tier != "none"


class Placement(Places):
    """Answers for every bucket of one model where its values and its state live, and owns what brings them.

    On the CPU the tier `cpu` is the device itself. All ranks decide alike.
    """

    def __init__(self, device: torch.device, rank: int, state: OffloadRule, values: OffloadRule, files: FileRule | None = None) -> None:
        super().__init__(device, state, values)
        self.link = DeviceLink(device, any(rule.pin for rule in (state, values) if rule.tier != "none"))
        self.faults = Faults()
        self.everyone: Communicator | None = None  # control over all ranks of a model that stages or layers spread further
        self.parked: Parked | None = None  # what `engine.offload_states` moved away as a whole
        self.goes_on = False  # values that cannot be read are zeros for now: see `going_on`
        self._rank = rank
        self._files = files or FileRule()
        self._io: FileIO | None = None
        self._stores: dict[str, DiskStore] = {}
        self._homes: dict[int, Home] = {}
        self._on_host: set[int] = set()  # buckets

    @staticmethod
    def on_device(device: torch.device) -> Placement:
        """Everything stays where it is computed."""
        return Placement(device, 0, OffloadRule(), OffloadRule())

    def open(self, control: Communicator, params: Communicator) -> None:
        """Makes the folders and files that the rules ask for. `params` moves the values. Raises OffloadError on all ranks.
        Collective where a disk is used."""
        room = torch.empty(0, dtype=torch.uint8)

        def shared(nbytes: int) -> Tensor:
            return params.empty(nbytes, room)

        with self.faults.kept():
            if self.state_rule.tier == "nvme":
                self._stores["optimizer"] = self._new_store("optimizer", self.state_rule)
            if self.values_rule.tier == "nvme":
                allocate = shared if self.device.type == "cpu" else None
                self._stores["params"] = self._new_store("params", self.values_rule, allocate)
        self.agree(control, "making files for offloaded state")

    # --- values of sharded parameters -----------------------------------------------------------------------------

    def values(self, subject: str, shard: Tensor, members: Callable[[], Iterable[Tensor]]) -> tuple[Tensor, Home]:
        """The tensor that a bucket keeps as its shard in place of `shard`, and its home."""
        rule = self.values_rule
        if rule.tier == "none":
            return shard, Memory()
        if shard.device.type != "cpu":
            shard = on_host(shard, rule.pin)
        if self.keeps_values(shard.numel()):
            return shard, Memory()
        return shard, self._stores["params"].record(subject, members)

    # --- masters and optimizer state ------------------------------------------------------------------------------

    def choose(self, index: int, numel: int, subject: str) -> None:
        """Decides for bucket `index` of `numel` elements whether its state leaves the device. Once for each, in order."""
        if self.moves_state(numel):
            self._on_host.add(index)
            if self.state_rule.tier == "nvme":
                self._homes[index] = self._stores["optimizer"].record(subject, tuple)

    def state(self, index: int) -> Home:
        """The home of masters and state of bucket `index`."""
        return self._homes.get(index) or Memory()

    def on_host(self, index: int) -> bool:
        """Whether bucket `index` is updated on the host, apart from the device that computes."""
        return self.device.type != "cpu" and index in self._on_host

    def more_state(self, subject: str, members: Callable[[], Iterable[Tensor]]) -> Home:
        """A home for state that belongs to no bucket."""
        rule = self.state_rule
        if rule.tier != "nvme" or rule.ratio == 0:
            return Memory()
        return self._stores["optimizer"].record(subject, members)

    def reserve(self, state_records: list[int]) -> None:
        """Sets aside what is needed: host buffers, and the disk's space where it is claimed. `state_records`: bytes that the
        records of masters and state will have. Raises OffloadError."""
        for name, rule, sizes in (
            ("optimizer", self.state_rule, [n for n in state_records if n]), ("params", self.values_rule, []),
        ):  # fmt: skip
            store = self._stores.get(name)
            if store is not None:
                store.flush()
                sizes = sizes or [r.nbytes for r in store.records]
                store.reserve(max(sizes, default=0), sum(sizes) if rule.claim else 0)

    # --- everything -----------------------------------------------------------------------------------------------

    @property
    def stores(self) -> list[DiskStore]:
        return list(self._stores.values())

    def check_here(self) -> None:
        """Raises OffloadError while states are away as a whole."""
        if self.parked is not None:
            raise self.parked.error()

    def agree(self, control: Communicator, doing: str, remedy: str = "") -> None:
        """See `Faults.agree`, over `everyone` where more ranks than those of `control` take part. Costs nothing where no disk is
        used."""
        if self.uses_disk:
            self.faults.agree(self.everyone or control, doing, remedy)

    def agree_on(self, control: Communicator, doing: str) -> None:
        """The same, of what only the ranks of `control` do."""
        if self.uses_disk:
            self.faults.agree(control, doing)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Context of work in which other ranks wait for this one's messages, so that an error of its disk must not end it:
        values that cannot be read are kept as a fault, and zeros in their place. Nothing that came of it may be used before the
        ranks have agreed."""
        self.goes_on = self.values_rule.tier == "nvme"
        try:
            yield
        except Exception as error:
            if self.goes_on and self.faults.first is not None:  # the zeros' fault
                raise self.faults.first from error
            raise
        finally:
            self.goes_on = False

    @property
    def uses_disk(self) -> bool:
        return "nvme" in (self.state_rule.tier, self.values_rule.tier)

    @contextlib.contextmanager
    def exposed(self, control: Communicator, *, write: bool) -> Iterator[None]:
        """Context in which everything on disk can be read (with `write`: written) as if it were in memory; see
        `DiskStore.exposed`. Raises `OffloadError` on all ranks; collective where a disk is used."""
        stack = contextlib.ExitStack()
        try:
            with self.faults.kept():
                for store in self._stores.values():
                    stack.enter_context(store.exposed(write))
            self.agree(control, "bringing what is on disk within reach")
            yield
        finally:
            with self.faults.kept():
                stack.close()
        self.agree(control, "storing what was loaded")

    def disk_bytes(self) -> int:
        return sum(s.bytes() for s in self._stores.values())

    def state_bytes_away(self) -> int:
        """Bytes of masters and optimizer state on disk."""
        return self._stores["optimizer"].bytes() if "optimizer" in self._stores else 0

    def staging_bytes(self) -> int:
        """Bytes of host buffers that data passes through."""
        return sum(s.buffers.bytes() for s in self._stores.values()) + self.link.bytes()

    def close(self) -> None:
        """Removes the files."""
        if self.parked is not None:
            self.parked.close()
        for store in self._stores.values():
            store.close()
        for folder in {id(s.folder): s.folder for s in self._stores.values()}.values():
            folder.remove()
        self._stores.clear()
        self._homes.clear()
        io, self._io = self._io, None
        if io is not None:
            io.close()

    def activation_store(self, base: str, buffers: int, pin: bool) -> DiskStore:
        """The file below `base`, behind so many buffers, of activations that wait for backward. Raises OffloadError."""
        name = f"activations.{buffers}"
        key = f"{name} in {base}"
        if key not in self._stores:
            self._stores[key] = self._new_store(name, OffloadRule("nvme", base, pin, buffers))
        return self._stores[key]

    def io(self) -> FileIO:
        """The threads that read and write files."""
        if self._io is None:
            self._io = file_io(self._files.requests, self._files.block)
        return self._io

    def folder(self, base: str) -> RankFolder:
        """A folder of this process below `base`. Raises OffloadError."""
        return RankFolder(base, self._rank)

    def _new_store(self, name: str, rule: OffloadRule, allocate: Allocate | None = None) -> DiskStore:
        allocate = allocate or (pinned_bytes if rule.pin and self.device.type != "cpu" else disk_bytes)
        return DiskStore(
            self._folder(rule.folder or ""), f"{name}.bin", self.io(), Buffers(rule.buffers, allocate),
            read_ahead=rule.read_ahead, write_behind=rule.write_behind,
        )  # fmt: skip

    def _folder(self, base: str) -> RankFolder:
        for store in self._stores.values():
            if store.folder.asked == base:
                return store.folder
        return self.folder(base)
