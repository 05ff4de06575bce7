"""Operations that native code does by itself: in one order with those of Python, without a turn of the interpreter, and let go of
when they are done."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.lane import Operation
from zeroengine.comm.listening import Listener, Movement
from zeroengine.comm.stream import Stream, Turn
from zeroengine.ops.build import library

pytestmark = pytest.mark.skipif(library("shm").dll is None, reason="no native library")


def _fabric() -> Fabric:
    init_distributed(verbose=False)
    return Fabric(timeout=30)


def _in_turn(rank: int, world: int) -> tuple[list[float], list[Turn]]:
    turns: list[Turn] = []
    serve = Stream.serve

    def counted(self: Stream) -> Turn:
        turns.append(serve(self))
        return turns[-1]

    Stream.serve = counted  # type: ignore[method-assign]
    fabric = _fabric()
    comm = fabric.communicator("ring")
    works, results = [], []
    for i in range(30):
        value = comm.empty(50_000, torch.empty(0)).fill_(rank + i)
        if i % 10 == 9:  # a maximum is Python's
            works.append(comm.all_reduce(value, f"value {i}", op="max"))
        else:
            works.append(comm.all_reduce(value, f"value {i}"))
        results.append(value)
    full, part = torch.empty(world * 7), torch.full((7,), float(rank))
    works.append(comm.all_gather(full, part, "parts"))
    mine = torch.zeros(7)
    works.append(comm.reduce_scatter(mine, full, "sum of parts"))
    swapped = torch.empty(world)
    works.append(comm.all_to_all(swapped, torch.arange(world) + 10.0 * rank, "swap"))
    for work in works:
        work.wait()
    comm.barrier("end")
    seen = list(turns)
    fabric.close()
    return [float(r[-1]) for r in results] + [float(mine[0]), *swapped.tolist()], seen


@pytest.mark.parametrize("world", [2, 3])
def test_native_and_other_operations_keep_one_order(world: int) -> None:
    for rank, (values, turns) in enumerate(run_ranks(_in_turn, world, timeout=60)):
        top, total = world - 1, sum(range(world))
        want = [float(top + i) if i % 10 == 9 else float(total + world * i) for i in range(30)]
        assert values[:30] == want
        assert values[30] == world * rank  # everybody gathered the same
        assert values[31:] == [rank + 10.0 * peer for peer in range(world)]
        assert turns == [Turn.FOREIGN] * 3


def _held(rank: int, world: int) -> list[bool]:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    gone = []
    for op in ("sum", "max"):
        value = torch.ones(1000)
        seen = weakref.ref(value.untyped_storage())
        comm.all_reduce(value, "value", op=op).wait()
        del value
        deadline = time.monotonic() + 5  # the thread may be on its way out of the closure
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        gone.append(seen() is None)
    fabric.close()
    return gone


def test_what_is_done_holds_no_tensors() -> None:
    assert run_ranks(_held, 2, timeout=60) == [[True, True]] * 2


class _Alarm(Exception):
    pass


def _late(rank: int, world: int) -> float:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    value = torch.ones(1000)
    spent = 0.0
    if rank == 0:

        def ring(signum: int, frame: object) -> None:
            raise _Alarm

        signal.signal(signal.SIGALRM, ring)
        work, begin = comm.all_reduce(value, "value"), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_Alarm):
            work.wait()
        spent = time.monotonic() - begin
        work.wait()
    else:
        time.sleep(4)
        comm.all_reduce(value, "value").wait()
    assert value.tolist() == [2.0] * 1000
    fabric.close()
    return spent


def test_signals_are_handled_in_a_wait() -> None:
    assert 0.2 < run_ranks(_late, 2, timeout=60)[0] < 2.5


class _Ear(Listener):
    def __init__(self) -> None:
        self.heard: list[Movement] = []

    def wait_ends(self, movement: Movement) -> None:
        self.heard.append(movement)


def _timed(rank: int, world: int) -> list[tuple[float, float, float]]:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    ear = _Ear()
    fabric.listen(ear)
    value = torch.ones(1000)
    work = comm.all_reduce(value, "value")
    if rank == 1:
        time.sleep(0.3)
    work.wait()
    comm.all_reduce(value, "value", op="max").wait()
    now = time.perf_counter()
    fabric.close()
    return [(m.began - m.issued, m.ended - m.began, now - m.ended) for m in ear.heard if m.began is not None and m.ended is not None]


def test_listeners_learn_when_data_moved() -> None:
    for times in run_ranks(_timed, 2, timeout=60):
        assert len(times) == 2
        assert all(0 <= t < 20 for each in times for t in each)


def _left_alone(rank: int, world: int) -> list[str]:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    said = []
    if rank == 0:
        value = torch.ones(300_000)
        works = [comm.all_reduce(value, "first"), comm.all_reduce(value, "second", op="max"), comm.all_reduce(value, "third")]
        comm.close()  # rank 1 never comes
        for work in works:
            with pytest.raises(RuntimeError) as error:
                work.wait()
            said.append(str(error.value))
        for _ in range(2):
            comm.interrupt(RuntimeError("too late"))
        with pytest.raises(RuntimeError, match="closed"):
            comm.all_reduce(value, "fourth")
        assert value.tolist() == [1.0] * 300_000
    else:
        comm.close()
    return said


def test_operations_that_a_close_gave_up_have_failed() -> None:
    said = run_ranks(_left_alone, 2, timeout=60)[0]
    assert len(said) == 3 and all("closed" in text or "given up" in text for text in said)


def _broken_off(rank: int, world: int) -> str:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    value = torch.ones(10)
    comm.all_reduce(value, "before").wait()
    put = Stream.put

    def interrupted(self: Stream, order: object) -> None:
        raise KeyboardInterrupt

    Stream.put = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(value, "in the middle")
    Stream.put = put  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as error:
        comm.all_reduce(value, "after")
    return str(error.value)


def test_a_submit_that_was_interrupted_ends_the_lane() -> None:
    for text in run_ranks(_broken_off, 2, timeout=60):
        assert "in the middle" in text and "KeyboardInterrupt" in text


def _interrupted_as_it_finishes(rank: int, world: int) -> list[float]:
    """Seconds of a wait after one that a signal broke off as it took note of the operation."""
    fabric = _fabric()
    comm = fabric.communicator("ring")
    finish = Operation.finish
    waited: list[float] = []

    def interrupted(self: Operation, error: Exception | None = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return finish(self, error)

    for i in range(20):  # the monitor takes note of operations, too, and may be first
        work = comm.all_reduce(torch.ones(5), f"value {i}")
        Operation.finish = interrupted if not waited else finish  # type: ignore[method-assign]
        try:
            work.wait()
        except KeyboardInterrupt:
            Operation.finish = finish  # type: ignore[method-assign]
            began = time.monotonic()
            work.wait()
            waited.append(time.monotonic() - began)
        Operation.finish = finish  # type: ignore[method-assign]
    comm.barrier("end")
    fabric.close()
    return waited


def test_a_wait_that_was_interrupted_as_it_ended_can_be_repeated() -> None:
    for waited in run_ranks(_interrupted_as_it_finishes, 2):
        assert len(waited) == 1 and waited[0] < 5
