"""What the heartbeat tells about the main thread: the line of user code, and the ranks a torch call waits for."""

from __future__ import annotations

import gc
import threading
from typing import Any

from zeroengine.comm.health import Monitor
from zeroengine.comm.lane import Lane
from zeroengine.comm.torch_calls import CallWatch, GroupCount
from zeroengine.comm.whereabouts import Place, main_thread_place, place_in

C10D = "/x/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def sampled_elsewhere() -> Place:
    found: list[Place] = []
    thread = threading.Thread(target=lambda: found.append(main_thread_place()))
    thread.start()
    thread.join()
    return found[0]


def test_sample_names_the_line_of_the_main_thread_and_leaves_the_collector_as_it_was() -> None:
    place = sampled_elsewhere()
    assert place.line.startswith("comm/test_whereabouts.py:") and place.line.endswith("(sampled_elsewhere)")
    assert place.call is None and gc.isenabled()
    gc.disable()
    try:
        sampled_elsewhere()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_sampling_a_thread_that_runs_is_safe() -> None:
    """Frames come and go under the sampler: generators, exceptions, recursion."""
    stop, seen = threading.Event(), []

    def sample() -> None:
        while not stop.is_set():
            seen.append(main_thread_place().line)

    def down(depth: int) -> int:
        return sum(down(depth - 1) for _ in range(2)) if depth else 1

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for _ in range(200):
            assert down(7) == 128
    finally:
        stop.set()
        thread.join()
    assert seen and all(line == "no line of user code" or "(" in line for line in seen)


def test_outermost_torch_call_counts() -> None:
    stack = [(C10D, "all_reduce", 9), (C10D, "wrapper", 8), (C10D, "all_gather_object", 7), ("/job/train.py", "main", 3)]
    assert place_in(stack) == Place("job/train.py:3 (main)", "all_gather_object")
    assert place_in([(C10D, "get_rank", 9), ("/job/train.py", "main", 3)]).call is None
    assert place_in([]).call is None


def test_call_waits_in_the_group_that_moved() -> None:
    def counts(default: int, sub: int) -> dict[str, GroupCount]:
        return {"default": GroupCount(default, (0, 1, 2)), "sub": GroupCount(sub, (0, 2))}

    watch = CallWatch()
    assert watch.ranks("a:1", None, counts(3, 0)) is None
    assert watch.ranks("a:2", "barrier", counts(4, 0)) == (0, 1, 2)
    assert watch.ranks("a:2", "barrier", counts(4, 0)) == (0, 1, 2), "it is still there"
    assert watch.ranks("a:3", "barrier", counts(4, 1)) == (0, 2)
    assert watch.ranks("a:4", "barrier", counts(5, 2)) is None, "one of two"
    assert watch.ranks("a:4", "barrier", counts(5, 2)) is None
    assert watch.ranks("a:5", "new_group", counts(6, 2)) is None, "a call that nobody counts"
    assert watch.ranks("a:6", "barrier", counts(6, 2)) is None, "nothing moved since"


def test_closed_stream_is_no_evidence() -> None:
    class Store:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: 1

    monitor = Monitor(Store(), 0, 2, None, 60.0)  # type: ignore[arg-type]

    class Watch:
        def watch(self, lane: Lane) -> None:
            monitor.add_lane(lane)

        def unwatch(self, lane: Lane) -> None:
            monitor.remove_lane(lane)

    lane = Lane("params", (1,), Watch(), None)  # type: ignore[arg-type]
    assert monitor.own().issued == {"params": 0}
    lane.close(5.0)
    assert lane.error is not None and monitor.own().issued == {} and monitor._status().poisoned == {}
    monitor.record_end("exited")
