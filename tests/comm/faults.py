"""Scenarios in which ranks fail or part ways. Run by `tests.comm.processes` as the main module of real processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.fabric import AnyCommunicator


class Job:
    """Two communicators of the whole world, a few good steps behind them."""

    def __init__(self, timeout: float, stall_timeout: float = 60.0) -> None:
        init_distributed(verbose=False)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.fabric = Fabric(timeout=timeout, stall_timeout=stall_timeout)
        self.params: AnyCommunicator = self.fabric.communicator("params")
        self.control: AnyCommunicator = self.fabric.communicator("control", control=True)
        for step in range(3):
            self.gather(f"layers.{step}")
        self.control.barrier("ready")

    def gather(self, subject: str, numel: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        full = torch.empty(numel * self.world, dtype=dtype)
        self.params.all_gather(full, torch.full((numel,), float(self.rank), dtype=dtype), subject).wait()
        return full


def fault() -> None:
    print(f"FAULT {time.time()}", flush=True)


def end(victim: int, how: str, timeout: float) -> None:
    """Rank `victim` ends (or stops) between two steps; the others gather."""
    job = Job(timeout)
    if job.rank == victim:
        time.sleep(0.5)  # the others already wait
        fault()
        if how == "raise":
            raise ValueError("the tokenizer met a lone surrogate")
        if how == "sys_exit":
            sys.exit(3)
        if how == "return":
            return
        if how == "os_exit":
            os._exit(4)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        time.sleep(600)
    job.gather("layers.7.weight")


def barrier(victim: int, timeout: float) -> None:
    """Rank `victim` sits in a barrier of torch.distributed."""
    job = Job(timeout)
    fault()
    if job.rank == victim:
        dist.barrier()
    else:
        job.gather("layers.7.weight")


def other_stream(victim: int, timeout: float) -> None:
    """Rank `victim` waits on another communicator."""
    job = Job(timeout)
    fault()
    if job.rank == victim:
        job.control.exchange(torch.zeros(2), "clip norm")
    else:
        job.gather("layers.7.weight")


def differs(victim: int, timeout: float) -> None:
    """Rank `victim` gathers another layer on the same communicator."""
    job = Job(timeout)
    fault()
    job.gather("layers.8.weight" if job.rank == victim else "layers.7.weight")


def slow(victim: int, seconds: float, timeout: float) -> None:
    """Rank `victim` is busy in user code for longer than the timeout: no error."""
    job = Job(timeout)
    if job.rank == victim:
        time.sleep(seconds)
    assert job.gather("layers.7.weight")[-1] == job.world - 1
    # the last rank waits for rank 1 in `params`, rank 1 for rank 0 in `control`, and rank 0 is busy: a chain, no circle
    if job.rank == 0:
        time.sleep(seconds)
    if job.rank == job.world - 1:
        work = job.control.all_reduce(torch.zeros(1), "norm")
        job.gather("layers.8.weight")
        work.wait()
    else:
        job.control.all_reduce(torch.zeros(1), "norm").wait()
        job.gather("layers.8.weight")
    job.fabric.close()
    print("FINE", flush=True)


def stalled(victim: int, timeout: float) -> None:
    """Rank `victim` stays in user code for longer than the stall timeout."""
    job = Job(timeout, stall_timeout=4.0)
    fault()
    if job.rank == victim:
        time.sleep(60)
    job.gather("layers.7.weight")


def inside(victim: int, how: str, timeout: float) -> None:
    """Rank `victim` ends or stops while all ranks are in the middle of large collectives, from a thread of its own."""
    job = Job(timeout)
    assert job.params.moves_over == "shared memory"
    gradients = job.params.empty(6_000_000, torch.empty(0)).fill_(1.0)
    plain = torch.ones(6_000_000)

    def end() -> None:
        fault()
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    if job.rank == victim:
        threading.Timer(1.0, end).start()
    while True:
        for tensor in (gradients, plain):
            job.params.all_reduce(tensor, "gradients", scale=1 / job.world).wait()


def caught(victim: int, timeout: float) -> None:
    """The error is caught, and the process leaves by sys.exit with operations still pending."""
    job = Job(timeout)
    if job.rank == victim:
        fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    full = torch.empty(8 * job.world)
    works = [job.params.all_gather(full.clone(), torch.zeros(8), f"layers.{i}") for i in range(4)]
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            print("CAUGHT", type(error).__name__, str(error)[:60], flush=True)
    sys.exit(7)


def backend(victim: int, what: str, how: str) -> None:
    """Rank `victim` of a plain script of torch.distributed ends, stops or goes another way while the others go on."""
    import zeroengine.comm.torch_backend  # noqa: F401

    dist.init_process_group("zeroengine", timeout=timedelta(seconds=4 if how == "sleep" else 600))
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300)) if what == "ddp" else None

    def act() -> None:
        if model is not None:
            model(torch.ones(2, 300)).sum().backward()
        elif what == "all_reduce":
            dist.all_reduce(torch.ones(5))
        elif rank == victim:
            dist.send(torch.ones(5), 0, tag=7 if what == "tagged message" else 0)
        elif rank == 0:
            dist.recv(torch.ones(5), victim, tag=7 if what == "tagged message" else 0)
        else:
            return

    act()
    if rank == victim:
        time.sleep(0.5)
        fault()
        if how == "raise":
            raise ValueError("no such token")
        if how == "sleep":
            time.sleep(60)
        if how == "other":
            dist.all_gather_into_tensor(torch.empty(10), torch.ones(5))
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    elif what.endswith("message") and rank != 0:
        return
    while True:
        act()


def absent(victim: int, timeout: float) -> None:
    """Rank `victim` never comes to the creation of a communicator."""
    job = Job(timeout)
    fault()
    if job.rank == victim:
        job.control.barrier("alone")
    job.fabric.communicator("late")


def main() -> None:
    scenario, victim, *rest = sys.argv[1:]
    values = [float(v) if v.replace(".", "").isdigit() else v for v in rest]
    globals()[scenario](int(victim), *values)


if __name__ == "__main__":
    main()
