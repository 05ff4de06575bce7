"""Jobs over hosts through Slurm, mpirun, pdsh, and the same command started on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.launcher import slurmlab
from tests.launcher.jobs import ZERORUN, Job, Launches
from tests.launcher.netlab import Lab, command_of, kill
from tests.launcher.test_hosts_ssh import SUM, nothing_left, waiting

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def slurm(hosts: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if reason := slurmlab.missing():
        pytest.skip(reason)
    with slurmlab.slurm(hosts, tmp_path_factory.mktemp("slurm")) as env:
        yield env


def lines_of(hosts: Lab, count: int, first: str = "") -> list[str]:
    """What SUM prints on the first `count` hosts with one rank each, which know the first host by its address or by `first`."""
    first, total = first or hosts.hosts[0].address, count * (count + 1) // 2
    return [f"[rank{i}] n{i + 1} {total} {i} 0 {count} 1 {first} eth7" for i in range(count)]


def test_salloc_runs_on_what_was_allocated(launches: Launches, hosts: Lab, slurm: dict[str, str]) -> None:
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1"]
    job = launches.start("--launcher-addr", f"{hosts.subnet}.254", launches.script(SUM), env=slurm, within=command)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == lines_of(hosts, 2)
    job = launches.start(
        "--launcher-addr", f"{hosts.subnet}.254", "--include", "n3:1", "--no-python", "sh", "-c", "echo $(hostname) $WORLD_SIZE; exit 7",
        env=slurm, within=["salloc", "-Q", "-N3", "--ntasks-per-node=2"],
    )  # fmt: skip
    assert job.finish() == 7 and job.out == "n3 1\n", job.err


def test_one_zerorun_on_each_host_started_by_srun(launches: Launches, hosts: Lab, slurm: dict[str, str]) -> None:
    within = ["srun", "-N2", "--ntasks-per-node=1", "--export=ALL"]
    job = launches.start("--nproc", "1", launches.script(SUM), env=slurm, within=within)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == lines_of(hosts, 2, "n1")


def test_a_cancelled_allocation_lets_the_ranks_save(launches: Launches, hosts: Lab, slurm: dict[str, str]) -> None:
    script = waiting(launches, before="signal.signal(signal.SIGTERM, lambda *_: ((folder / f'saved-{rank}').touch(), sys.exit(0)))")
    batch = launches.folder / "batch"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {ZERORUN} --env FOLDER {script}\n")
    env = {**os.environ, **slurm, "FOLDER": str(launches.folder), "TEST_OF_ZERORUN": "batch"}
    output = launches.folder / "batch.out"
    command = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "-o", str(output), str(batch)]
    job = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=launches.folder).stdout.strip()
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    subprocess.run(["scancel", job], env=env, check=True)
    launches.wait_for("saved-0", "saved-1", bound=10)
    assert nothing_left(hosts, Job(subprocess.Popen(["true"], text=True), "TEST_OF_ZERORUN=batch"), 10)
    assert "SIGTERM: ending the ranks" in output.read_text()


MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize("name", ["mpi", "pdsh"])
def test_one_command_for_all_hosts(launches: Launches, hosts: Lab, name: str) -> None:
    program = {"mpi": "mpirun", "pdsh": "pdsh"}[name]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (Debian: openmpi-bin, pdsh)")
    args = ["--launcher-args", f"--mca plm_rsh_args '-F {hosts.ssh_config}'"] if name == "mpi" else []
    env = {**MPI, "PDSH_SSH_ARGS_APPEND": f"-F {hosts.ssh_config}", "MY_SECRET": "pass word", "HOME": str(launches.folder)}
    options = ["--launcher", name, *args, "--launcher-addr", f"{hosts.subnet}.254", "--hostfile", hosts.hostfile(launches.folder, count=2)]
    script = launches.script(
        SUM
        + """
    import sys
    if os.environ["RANK"] == "1":
        sys.exit(5 if os.environ["MY_SECRET"] == "pass word" else 6)
    """
    )
    job = launches.start(*options, "--env", "MY_SECRET", script, env=env)
    assert job.finish() == 5, job.err
    assert sorted(job.out.splitlines()) == lines_of(hosts, 2)
    assert "rank 1 failed first (host n2" in job.err
    assert nothing_left(hosts, job, 5)
    assert not list((launches.folder / ".cache").rglob("job-*"))  # the file with pdsh's secret


def on_each(launches: Launches, hosts: Lab, count: int, *argv: str, nnodes: str = "", env: dict[str, str] | None = None) -> list[Job]:
    """The same command on the first hosts, started by hand; the last host first."""
    master = ["--no-ssh", "--nnodes", nnodes or str(count), "--master-addr", hosts.hosts[0].address, "--master-port", "29433"]
    return [
        launches.start(*master, "--node-rank", str(i), "--nproc", "1", *argv, within=hosts.hosts[i].enter(), env=env)
        for i in reversed(range(count))
    ][::-1]


def test_the_same_command_on_each_host(launches: Launches, hosts: Lab) -> None:
    first, second = on_each(launches, hosts, 2, launches.script(SUM), env={"ZERORUN_TOKEN": "of this job"})
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert first.out.splitlines() + second.out.splitlines() == lines_of(hosts, 2)  # each on its own console


@pytest.mark.parametrize("what", ["rank", "first", "SIGTERM"])
def test_the_same_command_ends_on_all_hosts(launches: Launches, hosts: Lab, what: str) -> None:
    first, second = on_each(launches, hosts, 2, waiting(launches, "sys.exit(5)" if what == "rank" else "pass"))
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    if what != "rank":  # nsenter stands between us and zerorun
        host, number = (hosts.hosts[0], signal.SIGKILL) if what == "first" else (hosts.hosts[1], signal.SIGTERM)
        (zerorun,) = [pid for pid in host.find("--no-ssh") if "nsenter" not in command_of(pid)]
        kill(pid=zerorun, number=number)
    codes = first.finish(12), second.finish(12)
    if what == "rank":
        assert codes == (5, 5)
        assert all("rank 1 failed first (host n2" in job.err for job in (first, second))
    elif what == "SIGTERM":
        assert codes[0] == 143
    else:
        assert codes[1] != 0
    assert nothing_left(hosts, first, 10)


def test_a_host_with_another_secret_is_no_host_of_the_job(launches: Launches, hosts: Lab) -> None:
    master = ("--master-addr", hosts.hosts[0].address, "--master-port", "29434")
    argv = ("--no-ssh", "--nnodes", "2", *master, "--nproc", "1", "--connect-timeout", "4")
    script = launches.script("pass")
    jobs = [
        launches.start(*argv, "--node-rank", str(i), script, within=hosts.hosts[i].enter(), env={"ZERORUN_TOKEN": f"secret {i}"})
        for i in range(2)
    ]
    assert [job.finish(30) for job in jobs] == [1, 1]
    assert "1 of 2 nodes have come within 4 s" in jobs[0].err


def test_the_first_host_does_not_answer(launches: Launches, hosts: Lab) -> None:
    argv = ("--no-ssh", "--nnodes", "2", "--master-addr", hosts.hosts[2].address, "--node-rank", "1", "--connect-timeout", "2")
    job = launches.start(*argv, launches.script("pass"), within=hosts.hosts[0].enter())
    assert job.finish(20) == 2
    assert f"n1 cannot reach the launcher at {hosts.hosts[2].address}:29400 within 2 s: Connection refused" in job.err
