"""A job of two ranks that is killed while it saves, in the foreground and in the background, resumes with exact losses."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.engines import build, train
from tests.ranks import run_ranks

STEPS = 40


def _until_killed(rank: int, world: int, folder: str, seed: int) -> None:
    engine = build(3)
    delay = random.Random(seed).uniform(0.3, 1.2)

    def kill() -> None:
        time.sleep(delay + 0.05 * rank)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    for step in range(10_000):
        train(engine, step % STEPS, 1, rank)
        engine.save_checkpoint(folder, blocking=step % 2 == 0, keep_last=2)


def _resume(rank: int, world: int, folder: str) -> tuple[int, bool, list[str]]:
    engine = build(2, seed=8)
    path, _ = engine.load_checkpoint(folder)
    if path is None:
        return 0, False, []
    done = engine.global_steps
    resumed = [train(engine, (done + i) % STEPS, 1, rank)[0] for i in range(3)]
    engine.save_checkpoint(folder, keep_last=2)
    engine.destroy()
    left = sorted(p.name for p in Path(folder).iterdir() if p.name.startswith("."))
    engine = build(2)
    whole = [train(engine, i % STEPS, 1, rank)[0] for i in range(done + 3)]
    return done, resumed == whole[done:], left


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_resumed(tmp_path: Path, seed: int) -> None:
    killed = run_ranks(_until_killed, 2, str(tmp_path), seed, timeout=60, failures=True)
    assert signal.SIGKILL in [-(o.exitcode or 0) for o in killed]
    for done, exact, left in run_ranks(_resume, 2, str(tmp_path), timeout=100):
        assert done > 0 and exact
        assert not left, "the next save removes what the killed one left"
