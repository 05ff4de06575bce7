"""Every way in which operations of ranks can differ: each rank gets an error that names all of them, before data moves.

One pair of processes for all cases: an error ends a communicator, and the next case makes another. How whole processes
end is in test_faults.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, TorchCommunicator, init_distributed
from zeroengine.errors import DivergenceError

Case = Callable[[TorchCommunicator, bool], None]


def gather(comm: TorchCommunicator, subject: str, numel: int = 8, dtype: torch.dtype = torch.float32) -> None:
    comm.all_gather(torch.zeros(2 * numel, dtype=dtype), torch.zeros(numel, dtype=dtype), subject).wait()


def _order(comm: TorchCommunicator, odd: bool) -> None:
    for name in ("b.weight", "a.weight") if odd else ("a.weight", "b.weight"):
        gather(comm, name)


def _operation(comm: TorchCommunicator, odd: bool) -> None:
    if odd:
        comm.reduce_scatter(torch.zeros(8), torch.zeros(16), "w").wait()
    else:
        gather(comm, "w")


def _prefetch(comm: TorchCommunicator, odd: bool) -> None:
    """Several operations in flight; the one that differs is in the middle."""
    works = []
    for i in (0, 2, 1) if odd else (0, 1, 2):
        works.append(comm.all_gather(torch.zeros(16), torch.zeros(8), f"layers.{i}"))
    works[0].wait()
    for work in reversed(works):
        work.wait()


def _splits(comm: TorchCommunicator, odd: bool) -> None:
    sends = [2, 1] if odd else [1, 1]
    output, source = torch.zeros(2), torch.zeros(sum(sends))
    comm.all_to_all(output, source, "experts", output_splits=[1, 1], input_splits=sends).wait()


def _message(comm: TorchCommunicator, odd: bool) -> None:
    t = torch.zeros(5 if odd else 4)
    (comm.send(t, 0, "activation") if odd else comm.recv(t, 1, "activation")).wait()


def _message_order(comm: TorchCommunicator, odd: bool) -> None:
    t = torch.zeros(4)
    for name in ("m1", "m0") if odd else ("m0", "m1"):
        (comm.send(t, 0, name) if odd else comm.recv(t, 1, name)).wait()


def _control(comm: TorchCommunicator, odd: bool) -> None:
    comm.barrier("end of step") if odd else comm.exchange(torch.zeros(2), "clip norm")


CASES: dict[str, tuple[Case, str, str]] = {
    "subject": (lambda c, odd: gather(c, "y" if odd else "x"), "0: all_gather 'x'", "0: all_gather 'y'"),
    "order": (_order, "0: all_gather 'a.weight'", "0: all_gather 'b.weight'"),
    "size": (lambda c, odd: gather(c, "w", 9 if odd else 8), "'w', 16 x float32", "'w', 18 x float32"),
    "dtype": (
        lambda c, odd: gather(c, "w", 8, torch.bfloat16 if odd else torch.float16), "16 x float16", "16 x bfloat16",
    ),
    "source": (lambda c, odd: c.broadcast(torch.zeros(4), int(odd), "w").wait(), "from rank 0", "from rank 1"),
    "scale": (
        lambda c, odd: c.all_reduce(torch.zeros(4), "w", scale=0.5 if odd else 0.25).wait(), "scale 0.25", "scale 0.5",
    ),
    "reduction": (lambda c, odd: c.all_reduce(torch.zeros(4), "w", op="max" if odd else "min").wait(), "min", "max"),
    "operation": (_operation, "0: all_gather 'w'", "0: reduce_scatter 'w'"),
    "prefetch": (_prefetch, "operation 1: all_gather 'layers.1'", "operation 1: all_gather 'layers.2'"),
    "message": (_message, "recv 'activation', 4 x float32", "send 'activation', 5 x float32"),
    "order of messages": (_message_order, "recv 'm0'", "send 'm1'"),
    "control": (_control, "exchange 'clip norm'", "barrier 'end of step'"),
    "long name": (
        lambda c, odd: gather(c, "encoder." * 60 + ("b" if odd else "a")), "encoder.a'", "encoder.b'",
    ),
}  # fmt: skip


def _all_cases(rank: int, world: int) -> dict[str, str]:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=10)
    texts = {}
    for name, (run, _, _) in {**CASES, "splits": (_splits, "", "")}.items():
        comm = fabric.communicator(name)
        assert isinstance(comm, TorchCommunicator)
        texts[name] = _error_of(run, comm, rank == 1)
        if name == "order":  # a communicator that diverged stays so
            assert _error_of(lambda c, odd: gather(c, "same"), comm, False) == texts[name]
    return texts


def _error_of(run: Case, comm: TorchCommunicator, odd: bool) -> str:
    try:
        run(comm, odd)
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("over", ["auto", "gloo"])
def test_every_difference_is_named_on_every_rank(over: str) -> None:
    for rank, texts in enumerate(run_ranks(_all_cases, 2, timeout=90, env={"ZE_COMM": over})):
        assert "rank 1: all_to_all 'experts', uneven blocks: sends 2 to rank 0, which expects 1" in texts.pop("splits")
        for name, (_, usual, odd) in CASES.items():
            lines = texts[name].splitlines()
            assert texts[name].startswith(f"rank {rank}: "), texts[name]
            assert f"communicator {name!r}" in lines[0], texts[name]
            assert any("rank 0: " in line and usual in line for line in lines[1:]), texts[name]
            assert any("rank 1: " in line and odd in line for line in lines[1:]), texts[name]
