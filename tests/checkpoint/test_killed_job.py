"""A job of two ranks that is killed while it saves, in the foreground and in the background, again and again: every start goes on
from a complete checkpoint, and all losses are those of a job that was never killed.

`ZE_KILLS=50 ZE_KILLS_SEED=7 pytest tests/checkpoint/test_killed_job.py` kills that often, at other moments.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

from tests.checkpoint.engines import build, train
from tests.ranks import run_ranks
from zeroengine.checkpoint import complete_tags

KILLS = int(os.environ.get("ZE_KILLS", "3"))
FIRST = 1  # what the job draws its weights from as long as nothing is saved
SEED = int(os.environ.get("ZE_KILLS_SEED", "1"))


def _until_killed(rank: int, world: int, folder: str, round_: int) -> None:
    """Goes on from what is there, and writes a diary: (step, loss), and when it saves."""
    saved = complete_tags(Path(folder))
    engine = build((3, 0, 2, 1)[round_ % 4], seed=-round_ if saved else FIRST)  # other weights, until it loads
    engine.load_checkpoint(folder)
    draw = random.Random(SEED * 1000 + round_)
    delays = [draw.uniform(0.01, 0.7)] * 2
    delays[draw.randrange(2)] += draw.choice([0.0, 0.002, 0.02, 0.2])

    def kill() -> None:
        time.sleep(delays[rank])
        os.kill(os.getpid(), signal.SIGKILL)

    with Path(f"{folder}/diary-{round_}-{rank}").open("w", buffering=1) as diary:
        diary.write(f"start {engine.global_steps}\n")
        killer = threading.Thread(target=kill, daemon=True)
        while True:
            step = engine.global_steps
            diary.write(f"loss {step} {train(engine, step, 1, rank)[0].hex()}\n")
            if not killer.is_alive():  # from the first save on: how long the first step takes says nothing
                killer.start()
            diary.write(f"saving {step + 1}\n")
            engine.save_checkpoint(folder, blocking=step % 2 == 0, keep_last=2)
            diary.write(f"saved {step + 1}\n")


def _afterwards(rank: int, world: int, folder: str, steps: int) -> tuple[int, list[float], list[float], list[str]]:
    """The last complete step and three losses from there, the losses of a job that was not killed, and what is left over
    after one more save."""
    engine = build(2, seed=8)  # other weights, until it loads
    engine.load_checkpoint(folder)
    done = engine.global_steps
    losses = train(engine, done, 3, rank)
    engine.save_checkpoint(folder, keep_last=2)
    engine.destroy()
    left = sorted(p.name for p in Path(folder).iterdir() if p.name.startswith("."))
    engine = build(2, seed=FIRST)
    whole = train(engine, 0, max(done + 3, steps), rank)
    return done, losses, whole, left


def _diary(folder: Path, round_: int, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"diary-{round_}-{rank}").read_text().splitlines()]


def test_killed_again_and_again(tmp_path: Path) -> None:
    for round_ in range(KILLS):
        ended = run_ranks(_until_killed, 2, str(tmp_path), round_, timeout=90, failures=True)
        assert signal.SIGKILL in [-(o.exitcode or 0) for o in ended], [o.error for o in ended]
    diaries = [line for round_ in range(KILLS) for line in _diary(tmp_path, round_, 0) + _diary(tmp_path, round_, 1)]
    steps = max(int(line[1]) + 1 for line in diaries if line[0] == "loss")
    results = run_ranks(_afterwards, 2, str(tmp_path), steps, timeout=300)
    in_a_save, reached = 0, 0
    for round_ in range(KILLS):
        starts = {int(_diary(tmp_path, round_, rank)[0][1]) for rank in range(2)}
        assert len(starts) == 1 and min(starts) >= reached, "a complete checkpoint was lost"
        for rank, (_, _, expected, _) in enumerate(results):
            diary = _diary(tmp_path, round_, rank)
            losses = {int(line[1]): float.fromhex(line[2]) for line in diary if line[0] == "loss" and len(line) == 3}
            assert losses == {step: expected[step] for step in losses}, f"round {round_}, rank {rank}"
            blocking = [int(line[1]) for line in diary if line[0] == "saved" and int(line[1]) % 2]
            reached = max(reached, *blocking, 0)  # step % 2 == 0 saved in the foreground
            in_a_save += diary[-1][0] == "saving"
    for done, losses, expected, left in results:
        assert done >= reached and losses == expected[done : done + 3]
        assert not left, "the next save removes what the killed one left"
    assert 3 * in_a_save >= 2 * KILLS, f"only {in_a_save} ranks of {2 * KILLS} were killed in a save: the moments are chosen badly"
