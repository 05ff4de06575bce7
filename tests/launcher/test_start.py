"""How ranks are started: their arguments, environment, `__main__`, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.jobs import ZERORUN, Launches
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import machine, options
from zeroengine.launcher.agent import too_many_ranks
from zeroengine.launcher.cli import Command, main
from zeroengine.launcher.plan import Plan

pytestmark = pytest.mark.timeout(120)

ODD = ["a b", "q'\"", "$HOME", "$$", "${local_rank}", "*", "", "--", "--nproc", "é\n", "-m"]


def test_arguments_and_environment_arrive_as_they_are(launches: Launches) -> None:
    script = launches.script("""
        import json, os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MY", "PASSED")
        path = os.path.join(os.environ["FOLDER"], os.environ["RANK"])
        seen = {"argv": sys.argv, "main": __name__, "file": __file__, "path": sys.path[0],
                "env": {name: os.environ.get(name) for name in names}}
        json.dump(seen, open(path, "w"))
    """)
    argv = ["--nproc=2", "--env", "MY=a =$b\n", "--env", "PASSED", "--env=OMP_NUM_THREADS=1", "job.py", *ODD]
    job = launches.run(*argv, env={"PASSED": "yes"})
    assert job.process.returncode == 0 and job.err == ""
    for rank in "01":
        seen = json.loads((launches.folder / rank).read_text())
        assert seen["argv"] == ["job.py", *ODD]
        assert (seen["main"], seen["file"], seen["path"]) == ("__main__", script, str(launches.folder))
        assert seen["env"] == {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MY": "a =$b\n", "PASSED": "yes",
        }  # fmt: skip


def test_a_module(launches: Launches) -> None:
    launches.script("", "pack/__init__.py")
    launches.script("import sys; from . import __name__ as p; print(p, __package__, sys.argv[1:])", "pack/__main__.py")
    launches.script("import pickle, sys\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(__spec__.name)", "pack/mod.py")
    job = launches.run("--nproc", "1", "-m", "pack", "-x")
    assert (job.process.returncode, job.out) == (0, "pack pack ['-x']\n")
    job = launches.run("--nproc", "1", "--module", "pack.mod")
    assert (job.process.returncode, job.out) == (0, "pack.mod\n")
    job = launches.run("--nproc", "1", "-m", "pack.none")
    assert job.process.returncode == 1 and "pack.none" in job.err


def test_worker_processes_of_multiprocessing_find_the_script(launches: Launches) -> None:
    job = launches.run("--nproc", "1", launches.script("""
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """))  # fmt: skip
    assert (job.process.returncode, job.out) == (0, "[2, 4]\n")


def test_another_program_and_another_interpreter(launches: Launches) -> None:
    job = launches.run("--nproc", "1", "--no-python", "sh", "-c", "echo $RANK; exit 6")
    assert (job.process.returncode, job.out) == (6, "0\n")
    launches.script('#!/bin/sh\necho mine; exec python3 "$@"', "mypython")
    os.chmod(launches.folder / "mypython", 0o755)
    job = launches.run("--nproc", "1", "--python", "./mypython", launches.script("print('yours')"))
    assert (job.process.returncode, job.out) == (0, "mine\nyours\n")


def test_ranks_meet_and_two_launches_do_not_collide(launches: Launches) -> None:
    script = launches.script("""
        import os, pathlib, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        folder = pathlib.Path(os.environ["FOLDER"])
        if dist.get_rank() == 0:
            (folder / os.environ["JOB"]).touch()
            while not all((folder / name).exists() for name in "AB"):  # both are there at the same time
                time.sleep(0.02)
        x = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            print(x.tolist())
        dist.destroy_process_group()
    """)
    jobs = [launches.start("--nproc", "2", script, env={"JOB": name}) for name in "AB"]
    for job in jobs:
        assert job.finish(90) == 0, job.err
        assert job.out == "[rank0] [3.0, 3.0, 3.0]\n"


def test_master_port(launches: Launches) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    job = launches.run("--nproc", "1", "--master-port", free, launches.script("import os; print(os.environ['MASTER_PORT'])"))
    assert (job.process.returncode, job.out) == (0, f"{free}\n")


def test_the_share_of_cores_is_said(launches: Launches) -> None:
    job = launches.run("--nproc", "2", launches.script("import os; print(os.environ['OMP_NUM_THREADS'])"))
    share = max(1, machine.physical_cores() // 2)
    assert job.out == f"[rank0] {share}\n[rank1] {share}\n" or job.out == f"[rank1] {share}\n[rank0] {share}\n"
    assert job.err.count("\n") == 1 and f"OMP_NUM_THREADS={share}" in job.err


REFUSED = [
    (["none.py"], "no script none.py in "),
    (["script"], "did you mean script.py?"),
    (["some.module"], "--module"),
    (["."], ". is a folder"),
    (["--nproc", "0", "script.py"], "--nproc 0: at least one"),
    (["--nproc", "-1", "script.py"], "--nproc -1: at least one"),
    (["--nproc", "two", "script.py"], "--nproc two: a number, auto or gpu"),
    (["--nrpoc", "2", "script.py"], "unknown option --nrpoc: did you mean `--nproc`?"),
    (["--nproc"], "expected one argument"),
    (["--nproc", "2"], "no script given"),
    (["--env", "NOT_SET_AT_ALL", "script.py"], "--env NOT_SET_AT_ALL: it is not set here"),
    (["--env", "=1", "script.py"], "--env '=1'"),
    (["--master-port", "70000", "script.py"], "--master-port 70000"),
    (["--max-restarts", "-1", "script.py"], "--max-restarts -1"),
    (["--grace", "nan", "script.py"], "--grace nan"),
    (["--python", "no-such-python", "script.py"], "--python: no program no-such-python"),
    (["--no-python", "no-such-program"], "--no-python: no program no-such-program"),
    (["--no-python", "--module", "sh"], "exclude each other"),
    (["--tee", "script.py"], "--tee needs --log-dir"),
    (["--nproc", "2", "--show", "2", "script.py"], "--show 2: the ranks are 0 to 1"),
    (["--show", "x", "script.py"], "--show x"),
    (["--log-dir", "script.py", "script.py"], "--log-dir script.py cannot be made"),
    (["--log-dir", "/proc/logs", "script.py"], "--log-dir /proc/logs cannot be made"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_a_wrong_command_line_is_refused(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("zerorun: error: ") and message in error and error.count("\n") == 1


def test_a_log_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "logs" / "rank0.out").mkdir(parents=True)
    assert main(["--log-dir", "logs", "script.py"]) == 2
    assert "--log-dir: cannot write logs/rank0.out" in capsys.readouterr().err


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, ZERORUN, "--master-port", str(port), "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"--master-port {port} cannot be used" in done.stderr and "in use" in done.stderr


def test_number_of_ranks_from_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    script = str(tmp_path / "script.py")
    monkeypatch.setattr(machine, "gpu_count", lambda: 4)
    assert options.parse([script]).plan.nproc == options.parse(["--nproc", "gpu", script]).plan.nproc == 4
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    assert options.parse([script]).plan.nproc == 1
    with pytest.raises(ZeroEngineError, match="torch sees no GPU"):
        options.parse(["--nproc", "gpu", script])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert "--nproc 2, but torch sees 1 GPU here" in (too_many_ranks(Plan(2, "script", "job.py")) or "")
    assert too_many_ranks(Plan(1, "script", "job.py")) is None


def test_a_plan_survives_its_journey() -> None:
    plan = Plan(2, "script", "a.py", ("x", "é\n"), env={"A": "b"}, show=(0, 1))
    assert Plan.from_dict(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_commands_are_found_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = {"run": Command("runs", "nowhere:run"), "count": Command("counts its arguments", "builtins:len")}
    assert main(["count", "a", "b", "c"], table) == 3
    assert main(["--help"], table) == 0 and "count  counts its arguments" in capsys.readouterr().out
    assert main([]) == 2 and "usage: zerorun" in capsys.readouterr().err
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("zerorun ")
