"""Training over hosts: equal to one host, resumed exactly, at another size too."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launcher.jobs import Job, Launches, wait_until
from tests.launcher.netlab import Lab, kill, serve
from tests.launcher.test_hosts_ssh import nothing_left

pytestmark = pytest.mark.timeout(180)

# ZeRO-3 on a tiny model. A step's batch of 12 (or SAMPLES) depends on the step alone, so any number of ranks sees the same.
TRAIN = """
    import json, os, pathlib, signal, sys, time
    import torch
    import zeroengine
    from zeroengine import comm

    folder = pathlib.Path(os.environ["FOLDER"])
    samples, width = int(os.environ.get("SAMPLES", "12")), int(os.environ.get("WIDTH", "16"))
    last, holds = int(os.environ.get("LAST", "6")), os.environ.get("HOLD", "").split(",")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
    config = {"elasticity": {"enabled": True, "max_train_batch_size": samples, "micro_batch_sizes": [2]},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}, "steps_per_print": None}
    engine, *_ = zeroengine.initialize(model=model, config=config)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    store = folder / "checkpoints"
    if (store / "latest").exists():
        engine.load_checkpoint(str(store))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = [c for c in engine.mechanism.groups.all if c.size > 1 and c is not engine.mechanism.groups.control]
    between = lambda: sum(c.sent_between_hosts for c in groups)
    engine.reset_traffic()
    at_start = between()
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    while engine.global_steps < last:
        step = engine.global_steps
        data = torch.randn(samples, 8, generator=torch.Generator().manual_seed(step))
        total = 0.0
        for i in range(steps):
            at = (i * size + rank) * micro
            loss = engine(data[at : at + micro]).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.item() / steps
        mean = torch.tensor(total, dtype=torch.float64)
        torch.distributed.all_reduce(mean)
        engine.save_checkpoint(str(store))
        if rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(json.dumps([step, mean.item() / size, size, engine.get_lr()[0], steps]) + "\\n")
        while True:  # until nobody holds, or somebody was asked to end
            held = f"{step + 1}:{size}" in holds and not (folder / f"go-{step + 1}").exists()
            state = torch.tensor([len(asked), int(held)])
            torch.distributed.all_reduce(state)
            if state[0]:
                sys.exit(0)
            if not state[1]:
                break
            time.sleep(0.05)
    over = sorted({c.moves_over for c in groups})
    (folder / f"sent-{rank}").write_text(json.dumps([between() - at_start, engine.traffic()["total"], over]))
    torch.distributed.destroy_process_group()
"""


def losses(folder: Path) -> list[tuple[int, float, int]]:
    """(step, loss, ranks) as they were written."""
    return [tuple(json.loads(line)[:3]) for line in (folder / "losses").read_text().splitlines()]


def trained(launches: Launches, folder: str, *argv: str, hosts: Lab | None = None, **env: str) -> tuple[Job, Path]:
    """Starts the training; its files are in `folder`."""
    place = launches.folder / folder
    place.mkdir(exist_ok=True)
    script = launches.script(TRAIN)
    values = {"FOLDER": str(place), **env}
    options = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    start = launches.start if hosts is None else lambda *words: hosts.start(launches, *words)
    return start(*options, *argv, script), place


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of six steps on one host with two ranks."""
    launches = Launches(tmp_path_factory.mktemp("alone"))
    job, place = trained(launches, "alone", "--nproc", "2")
    assert job.finish() == 0, job.err
    return [loss for _, loss, _ in losses(place)]


def test_two_hosts_train_as_one_does(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    job, place = trained(launches, "two", "--hostfile", hosts.hostfile(launches.folder, count=2), hosts=hosts)
    assert job.finish() == 0, job.err
    assert [loss for _, loss, _ in losses(place)] == alone


def test_ranks_of_a_host_share_memory_and_what_leaves_it_is_sent_once(launches: Launches, hosts: Lab) -> None:
    job, flat = trained(launches, "flat", "--nproc", "4", SAMPLES="8", WIDTH="8192")
    assert job.finish() == 0, job.err
    names = hosts.hostfile(launches.folder, count=2, slots=2)
    job, place = trained(launches, "levels", "--hostfile", names, hosts=hosts, SAMPLES="8", WIDTH="8192")
    assert job.finish() == 0, job.err
    assert losses(place) == losses(flat)
    for rank in range(4):
        between, total, over = json.loads((place / f"sent-{rank}").read_text())
        assert over == ["shared memory in a host, Gloo between hosts"]
        assert 3 * between == total  # to three others, of whom one is the own place of the other host
        assert json.loads((flat / f"sent-{rank}").read_text()) == [0, total, ["shared memory"]]


def test_a_killed_worker_is_restarted_and_goes_on_from_the_checkpoint(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    job, place = trained(launches, "killed", "--max-restarts", "1", "--hostfile", names, hosts=hosts, HOLD="3:2")
    assert wait_until(lambda: (place / "losses").exists() and len(losses(place)) == 3, 60), job
    for pid in hosts.hosts[1].find("bootstrap.py"):
        kill(pid)
    (place / "go-3").touch()
    assert job.finish() == 0, job.err
    assert "rank 1 failed first (host n2" in job.err and "restarting all ranks (1 of 1 restarts)" in job.err
    assert losses(place) == [(step, loss, 2) for step, loss in enumerate(alone)]


def test_a_host_whose_connection_is_lost_is_started_anew(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    """What the host is still ending of the time before does not end, or meet, what is started there now."""
    names = hosts.hostfile(launches.folder, count=2)
    job, place = trained(launches, "again", "--max-restarts", "1", "--hostfile", names, hosts=hosts, HOLD="3:2")
    assert wait_until(lambda: (place / "losses").exists() and len(losses(place)) == 3, 60), job
    for pid in hosts.hosts[0].sshds():
        kill(pid)
    serve(hosts.hosts[0])
    (place / "go-3").touch()
    assert job.finish() == 0, job.err
    assert "host n1 is lost" in job.err and "restarting all ranks (1 of 1 restarts)" in job.err
    assert losses(place) == [(step, loss, 2) for step, loss in enumerate(alone)]


def test_a_job_goes_on_with_fewer_hosts_and_takes_a_host_back(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    names = hosts.hostfile(launches.folder, count=3)
    argv = ("--nnodes", "1:3", "--grace", "2", "--hostfile", names)
    job, place = trained(launches, "elastic", *argv, hosts=hosts, HOLD="2:3,4:2")
    assert wait_until(lambda: (place / "losses").exists() and len(losses(place)) == 2, 60)
    hosts.hosts[2].link("down")
    try:
        assert wait_until(lambda: len(losses(place)) == 4, 60)
    finally:
        hosts.hosts[2].link("up")
    # At the fourth step the two wait until the third host is back and the launcher asks them to end.
    assert job.finish(90) == 0, job.err
    assert "host n3 is lost" in job.err and "2 ranks on 2 hosts" in job.err and "a host has joined" in job.err
    assert [(step, size) for step, _, size in losses(place)] == [(0, 3), (1, 3), (2, 2), (3, 2), (4, 3), (5, 3)]
    assert [loss for _, loss, _ in losses(place)] == pytest.approx(alone, rel=1e-6)
    rows = [json.loads(line) for line in (place / "losses").read_text().splitlines()]
    assert {row[3] for row in rows} == {0.01} and {row[2] * row[4] for row in rows} == {6}  # rate and batch are kept


def test_a_slow_network_that_loses_packets_changes_nothing(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    with hosts.hosts[1].disturbed(delay=0.02, loss=0.03):
        job, place = trained(launches, "slow", "--hostfile", names, hosts=hosts)
        assert job.finish(100) == 0, job.err
    assert job.seconds > 6 * 0.04  # a step needs more than one answer
    assert losses(place) == [(step, loss, 2) for step, loss in enumerate(alone)]


def test_a_network_that_loses_everything_ends_the_job_on_both_sides(launches: Launches, hosts: Lab) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    job, place = trained(launches, "lost", "--hostfile", names, hosts=hosts, LAST="100000")
    assert wait_until(lambda: (place / "losses").exists() and len(losses(place)) >= 2, 60)
    with hosts.hosts[1].disturbed(delay=0.0, loss=1.0):
        assert job.finish(12) == 1
        assert "host n2 is lost: nothing was heard of it for 4 s" in job.err
        assert nothing_left(hosts, job, 10)


def test_sigterm_checkpoints_and_the_next_launch_goes_on(launches: Launches, hosts: Lab, alone: list[float]) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    job, place = trained(launches, "stopped", "--hostfile", names, hosts=hosts, LAST="1000")
    assert wait_until(lambda: (place / "losses").exists() and len(losses(place)) >= 2, 60)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(12) == 143, job.err
    done = len(losses(place))
    job, _ = trained(launches, "stopped", "--nproc", "1", LAST=str(done + 2))
    assert job.finish() == 0, job.err
    seen = losses(place)
    assert [step for step, _, _ in seen] == list(range(done + 2)) and seen[-1][2] == 1
    for step, loss, _ in seen[: len(alone)]:
        assert loss == pytest.approx(alone[step], rel=1e-6)
