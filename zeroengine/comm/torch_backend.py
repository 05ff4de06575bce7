"""The backend "zeroengine" of torch.distributed: collectives of CPU tensors through memory that the processes of a host share.

    import zeroengine.comm.torch_backend
    torch.distributed.init_process_group("zeroengine")  # or "cpu:zeroengine,cuda:nccl"

Scripts, DDP, FSDP2 and DTensor use it as they use Gloo. Sums are made in an order that rank numbers alone decide, ranks that
issue different operations get a `DivergenceError`, and one that died, stopped or never comes is named. What has no native
form goes over Gloo: between hosts, sparse tensors, and messages with a tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroengine.comm.from_store import Alone, await_ranks, communicator_from_store
from zeroengine.comm.health import Monitor, install_hooks, process_monitor, start_monitor
from zeroengine.comm.lane import Operation, Watch
from zeroengine.comm.shared_setup import SharedMemory
from zeroengine.comm.torch_moves import Moves, Reduction, flat_list
from zeroengine.comm.torch_work import BackendWork
from zeroengine.comm.watch import HealthWatch
from zeroengine.errors import ConfigError, RankError

NAME = "zeroengine"
_PATIENCE = 10.0  # seconds in which a dead, stopped or diverged rank becomes an error
_GRACE = timedelta(seconds=60)  # Gloo's own timeout comes after ours, whose message names the rank
_ARENA = 16 << 30  # bytes of address space for the arena of a rank; pages exist where they were written


_ProcessGroup: Any = dist.ProcessGroup  # its stubs know each method under several signatures, of which one is called


class BackendGroup(_ProcessGroup):
    """A process group of torch. Methods have the names and arguments of torch's; they return at once, with a `BackendWork`.

    Tensors of other devices go to the backend that the group was asked to have for them ("cuda:nccl"), which is made on first
    use, or to the device's default one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta, name: str) -> None:
        """`ranks`: global ones, empty for the default group. Collective."""
        super().__init__(rank, size)  # torch's other constructor, which keeps the store, makes no objects of a subclass
        self._store = store
        self._timeout = timeout
        self._name = name
        self._world = not ranks
        self._members = tuple(ranks) or tuple(range(size))
        self._monitor: Monitor | None = None
        self._others: dist.ProcessGroup | None = None  # of the other devices
        self._coalesced: list[BackendWork] | None = None
        self._memory = SharedMemory(size, _ARENA * size)
        self._comm = communicator_from_store(name, store, self._members, rank, self._watch(store), self._memory, timeout + _GRACE)
        self._moves = Moves(self._comm)

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.allreduce([tensor], *_given(opts))
        reduction = Reduction.of(op if op is not None else opts, self.size())
        return self._work([self._moves.all_reduce(tensor, reduction)], [tensor])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if (other := self._elsewhere(*tensors)) is not None:
            return other.allreduce_coalesced(tensors, *_given(opts))
        reduction = Reduction.of(opts, self.size())
        return self._work([self._moves.all_reduce(tensor, reduction) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.reduce([tensor], *_given(opts))
        reduction = Reduction.of(op if op is not None else opts, self.size())
        return self._work([self._moves.reduce(tensor, _root(opts), reduction)], [tensor])

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.broadcast([tensor], *_given(opts))
        return self._work([self._moves.broadcast(tensor, _root(opts))], [tensor])

    def allgather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> Any:
        tensor = _only(inputs)
        if (other := self._elsewhere(tensor)) is not None:
            return other.allgather(outputs, [tensor], *_given(opts))
        pieces = flat_list(outputs)
        return self._work([self._moves.all_gather_list(pieces, tensor)], pieces)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """`outputs[r][i]`: tensor i of rank r."""
        if (other := self._elsewhere(*inputs)) is not None:
            return other.allgather_coalesced(outputs, inputs, *_given(opts))
        operations = [self._moves.all_gather_list([row[i] for row in outputs], tensor) for i, tensor in enumerate(inputs)]
        return self._work(operations, flat_list(outputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if (other := self._elsewhere(input)) is not None:
            return other.all_gather_single(output, input, *_given(opts))
        return self._work([self._moves.all_gather(output, input)], [output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if (other := self._elsewhere(*inputs)) is not None:
            return other.all_gather_single_coalesced(outputs, inputs, *_given(opts))
        return self._work([self._moves.all_gather(o, i) for o, i in zip(outputs, inputs, strict=True)], outputs)

    def reduce_scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> Any:
        tensor = _only(outputs)
        if (other := self._elsewhere(tensor)) is not None:
            return other.reduce_scatter([tensor], inputs, *_given(opts))
        reduction = Reduction.of(opts, self.size())
        return self._work([self._moves.reduce_scatter_list(tensor, flat_list(inputs), reduction)], [tensor])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if (other := self._elsewhere(input)) is not None:
            return other.reduce_scatter_single(output, input, *_given(opts))
        return self._work([self._moves.reduce_scatter(output, input, Reduction.of(opts, self.size()))], [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if (other := self._elsewhere(*inputs)) is not None:
            return other.reduce_scatter_single_coalesced(outputs, inputs, *_given(opts))
        reduction = Reduction.of(opts, self.size())
        return self._work([self._moves.reduce_scatter(o, i, reduction) for o, i in zip(outputs, inputs, strict=True)], outputs)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        tensor = _only(inputs)
        if (other := self._elsewhere(tensor)) is not None:
            return other.gather(outputs, [tensor], *_given(opts))
        pieces = flat_list(outputs)
        return self._work([self._moves.gather(pieces, tensor, _root(opts))], pieces)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None, timeout: Any = None) -> Any:
        tensor = _only(outputs)
        if (other := self._elsewhere(tensor)) is not None:
            return other.scatter([tensor], inputs, *_given(opts))
        return self._work([self._moves.scatter(tensor, flat_list(inputs), _root(opts))], [tensor])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None
    ) -> Any:
        if (other := self._elsewhere(input)) is not None:
            return other.all_to_all_single(output, input, output_split_sizes, input_split_sizes, *_given(opts))
        return self._work([self._moves.all_to_all(output, input, output_split_sizes or [], input_split_sizes or [])], [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if (other := self._elsewhere(*inputs)) is not None:
            return other.alltoall(outputs, inputs, *_given(opts))
        return self._work([self._moves.all_to_all_list(outputs, inputs)], outputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._backends_of(device).barrier(opts)
        return self._work([self._moves.barrier()], [])

    # names of older releases, which scripts and C++ still use
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803  # torch's name
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.send([tensor], dstRank, tag)
        return self._work([self._moves.send(tensor, dstRank, tag)], [tensor])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.recv([tensor], srcRank, tag)
        return self._work([self._moves.receive(tensor, srcRank, tag)], [tensor], [srcRank])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """A message from whatever rank. That ranks have died is not noticed while there may be one from another."""
        tensor = _only(tensors)
        if (other := self._elsewhere(tensor)) is not None:
            return other.recv_anysource([tensor], tag)
        source: list[int] = []
        return self._work([self._moves.receive_from_any(tensor, tag, source.append)], [tensor], source)

    # -- the group ---------------------------------------------------------------------------------------------------

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    # torch keeps a group's name in the backends of its devices, and there is none for the CPU
    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def name(self) -> str:
        return NAME

    @property
    def moves_over(self) -> str:
        """What carries the collectives of CPU tensors: "shared memory", "Gloo", or one inside a host and the other between."""
        return self._comm.moves_over

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Peers read tensors from `allocate_tensor` where they lie: see `set_allocate_memory_from_process_group_for_comm` of FSDP2."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._comm.empty(size, torch.empty(0, dtype=dtype))

    @property
    def _device_types(self) -> list[torch.device]:
        """torch looks here for where objects travel and whether states can be saved in the background."""
        return [torch.device(name) for name in dict.fromkeys(("cpu", *self._configured()))]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._backends_of(device)._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            self._backends_of(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._backends_of(device)._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return BackendWork([o for work in works for o in work.operations], [t for work in works for t in work.result()])

    def abort(self) -> None:
        """What runs here fails at once, and so on the ranks that wait for it."""
        self._comm.interrupt(RankError(f"rank {self._members[self.rank()]}: process group {self._name!r} was aborted"))
        if self._others is not None:
            self._others.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Called by `destroy_process_group`."""
        self._comm.close()
        if not self._comm.stuck:  # a thread that still reads the peers' memory keeps it mapped
            self._memory.close()
        if self._others is not None:
            self._others.shutdown()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _watch(self, store: dist.Store) -> Watch:
        if self.size() == 1:
            return Alone()
        limit = self._timeout.total_seconds()
        patience = min(_PATIENCE, limit)
        interval = min(1.0, patience / 10)
        if self._world:
            self._monitor = start_monitor(self, store, self.rank(), self.size(), interval)
            await_ranks(store, self.rank(), self.size(), self._timeout)
            return HealthWatch(self._monitor, patience, limit)
        return HealthWatch(process_monitor(interval), patience, limit)

    def _work(self, operations: list[Operation], tensors: Sequence[Tensor], source: Sequence[int] = ()) -> BackendWork:
        if self._monitor is not None:
            install_hooks(self._monitor)
        work = BackendWork(operations, tensors, source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _elsewhere(self, *tensors: Tensor) -> Any:
        """The group for tensors of another device than the CPU; None for those of the CPU."""
        device = tensors[0].device if tensors else torch.device("cpu")
        return None if device.type == "cpu" else self._backends_of(device)

    def _backends_of(self, device: torch.device) -> dist.ProcessGroup:
        if self._others is None:
            self._others = dist.ProcessGroup(self._store, self.rank(), self.size())
        if all(known.type != device.type for known in self._others._device_types):
            kind, backend = self._make_backend(device.type)
            for group in (self._others, self):
                group._register_backend(torch.device(device.type), kind, backend)
            self._others._set_default_backend(kind)
        return self._others

    def _make_backend(self, device: str) -> tuple[Any, Any]:
        name = self._configured().get(device) or dist.Backend.default_device_backend_map.get(device, "")
        store = dist.PrefixStore(f"{device}/", self._store)
        kinds = dist.ProcessGroup.BackendType
        if name == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()  # only in builds for CUDA
            options._timeout = self._timeout
            options.global_ranks_in_group = list(self._members)
            options.group_name = self._name
            return kinds.NCCL, dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
        if name == "gloo":
            return kinds.GLOO, dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._timeout)
        raise ConfigError(
            f"process group {self._name!r} has no backend for {device} tensors; ask for one that goes with {NAME!r}, as in "
            f'"cpu:{NAME},cuda:nccl"'
        )

    def _configured(self) -> dict[str, str]:
        """Device -> backend, as the group was asked for; empty while torch still makes it."""
        try:
            text = dist.get_backend_config(self)
        except (ValueError, TypeError):
            return {}
        return dict(part.split(":", 1) for part in text.split(",") if ":" in part)


def _create(options: Any, more: Any) -> BackendGroup:
    del more
    ranks = list(options.global_ranks_in_group)
    return BackendGroup(options.store, options.group_rank, options.group_size, ranks, options.timeout, str(options.group_id))


def register() -> None:
    """Makes the backend known to torch.distributed; importing this module has done so."""
    if NAME not in dist.Backend.backend_list:
        create: Callable[..., Any] = _create
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def _only(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"backend {NAME!r} takes one tensor of each rank, got {len(tensors)}")
    return tensors[0]


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _root(opts: Any) -> int:
    return 0 if opts is None else opts if isinstance(opts, int) else int(opts.rootRank)


register()
