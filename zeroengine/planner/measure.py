"""Measures what plans need of this machine, on as many ranks at once as a job would have."""

from __future__ import annotations

import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import RankError
from zeroengine.offload.buffers import host_bytes
from zeroengine.ops.aio import NOT_OFFERED, READ, WRITE, file_io, sums_for
from zeroengine.planner.hardware import Hardware
from zeroengine.planner.passes import Ledger

_TIMEOUT = 300.0
_REPEATS = 5
_LEAST = 0.08  # seconds of a repetition: long enough that ranks which share a core take turns on it, as they do in a step
_DISK = 1 << 25  # bytes of the file
_BLOCK = 1 << 20
_SMALL, _LARGE = 1 << 12, 1 << 21  # elements of the collectives that latency and rate are fitted to


def measure(ranks: int, folder: str | None = None) -> Hardware:
    """Starts `ranks` processes that measure together: they share cores, memory, links and the disk of `folder` (default: the system's for
    temporary files) as those of a job do. Raises `RankError` if one fails."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, ranks, port, folder or tempfile.gettempdir(), there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(_TIMEOUT):
                raise RankError(f"zerorun plan --measure: rank {rank} gave no answer within {_TIMEOUT:.0f} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise RankError(f"zerorun plan --measure: rank {rank} failed; its own message is above") from None
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
    slowest = {name: max(f[name] for f in found) for name in found[0] if name != "device"}
    return _hardware(ranks, str(found[0]["device"]), slowest)


def _hardware(ranks: int, device: str, took: dict[str, float]) -> Hardware:
    """From seconds (of the slowest rank) to rates."""
    rate, latency = _fit(took["small"], took["large"], ranks)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else _ram() / ranks
    what = f"measured on {platform.node()} with {ranks} ranks, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    return Hardware(
        f"this machine ({device})", device, float(memory), 1 / took["product"], 1 / took["product32"], 1 / took["memory"], 1 / took["host"],
        rate, rate, latency, latency, 1 / took["link"], 1 / took["disk"], took["operation"],
        per_node=max(ranks, 1), overlap=0.0 if device == "cpu" else 0.8, reserved=0.0 if device == "cpu" else 1e9, source=what,
    )  # fmt: skip


def _fit(small: float, large: float, ranks: int) -> tuple[float, float]:
    """(bytes a second, seconds of an operation) from an all-gather of each size."""
    share = 4.0 * (ranks - 1) / max(ranks, 1)
    if ranks == 1 or large <= small:
        return 1e12, max(small, 0.0)
    rate = share * (_LARGE - _SMALL) / (large - small)
    return rate, max(small - share * _SMALL / rate, 0.0)


def _ram() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _rank(rank: int, ranks: int, port: int, folder: str, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    from zeroengine.comm import Fabric, init_distributed
    from zeroengine.device import local_device

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = local_device()
    init_distributed()
    fabric = Fabric(device)
    comm = fabric.communicator("measure")
    barrier = fabric.communicator("measure control", control=True)

    def timed(work: Callable[[], object], times: int) -> float:
        _settle(device)
        barrier.barrier("measure")
        start = time.perf_counter()
        for _ in range(times):
            work()
        _settle(device)
        return (time.perf_counter() - start) / times

    def together(work: Callable[[], object]) -> float:
        """Seconds of one `work` while all ranks do it over and over: the median repetition."""
        work()
        mine = torch.tensor([_LEAST / max(timed(work, 1), 1e-7)], dtype=torch.float64)
        times = max(1, round(float(barrier.exchange(mine, "repetitions").max())))  # all ranks alike: some of it is collective
        return statistics.median(timed(work, times) for _ in range(_REPEATS))

    found: dict[str, Any] = {"device": device.type, **_computation(device, together), "disk": _disk(folder, rank, together)}
    for name, numel in (("small", _SMALL), ("large", _LARGE)):
        full = comm.empty(numel // ranks * ranks, torch.empty(0, device=device)).zero_()
        shard = full[: numel // ranks].clone()
        found[name] = together(lambda full=full, shard=shard: comm.all_gather(full, shard, "measure").wait())  # type: ignore[misc]
    pipe.send(found)
    fabric.close()


def _computation(device: torch.device, together: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """Seconds of a FLOP, of a byte, of an operation."""
    wide = 4096 if device.type != "cpu" else 512

    def product(dtype: torch.dtype) -> float:
        a, b = torch.randn(wide, wide, device=device).to(dtype), torch.randn(wide, wide, device=device).to(dtype)
        return together(lambda: a @ b) / (2.0 * wide**3)

    def passing(where: torch.device) -> float:
        x: Tensor = torch.randn(1 << 22, device=where)
        y = torch.empty_like(x)
        return together(lambda: torch.mul(x, 1.5, out=y)) / (2.0 * x.nbytes)

    start = torch.randn(1 << 22, pin_memory=device.type == "cuda")
    return {
        "product": product(torch.bfloat16),
        "product32": product(torch.float32),
        "memory": passing(device),
        "host": passing(torch.device("cpu")),
        "operation": _operation(device, together),
        "link": together(lambda: start.to(device, copy=True)) / start.nbytes,
    }


def _disk(folder: str, rank: int, together: Callable[[Callable[[], object]], float]) -> float:
    """Seconds of a byte that is written and read again, past the page cache where the file system allows it, as offloaded state is."""
    io = file_io(4, _BLOCK)
    memory, sums = host_bytes(_DISK), sums_for(_DISK, _BLOCK)
    path = os.path.join(folder, f"zeroengine-measure-{os.getpid()}-{rank}")
    file = os.fdopen(_opened(path), "r+b", buffering=0)
    try:

        def there_and_back() -> None:
            io.begin(WRITE, file, memory, 0, sums).wait()
            io.begin(READ, file, memory, 0, sums).wait()

        return together(there_and_back) / (2.0 * _DISK)
    finally:
        io.close()
        file.close()
        os.unlink(path)


def _opened(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise RankError(f"zerorun plan --measure: {path}: {error.strerror}; give a folder for its file with --nvme-path") from error
        return os.open(path, flags, 0o600)


def _operation(device: torch.device, together: Callable[[Callable[[], object]], float]) -> float:
    """Seconds of an operation that computes next to nothing, forward and backward with autograd and modules around it."""
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(20))).to(device)
    x = torch.ones(2, 8, device=device)

    def step() -> None:
        torch.autograd.backward(layers(x).sum())

    with Ledger(layers.parameters()) as ledger:
        step()
    return together(step) / ledger.operations


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
