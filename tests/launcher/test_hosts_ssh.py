"""A job over several hosts, reached by a real sshd in namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.jobs import Job, Launches, wait_until
from tests.launcher.netlab import Lab, command_of, kill, serve

pytestmark = pytest.mark.timeout(120)

SUM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    print(os.uname().nodename, int(x[0]), *(os.environ[n] for n in names))
    dist.destroy_process_group()
"""

# Ranks say that they are there, then rank 1 (on the second host) does `then`. No torch: they are quick to start.
WAIT = """
    import os, pathlib, signal, subprocess, sys, time
    rank, folder = os.environ["RANK"], pathlib.Path(os.environ["FOLDER"])
    attempt, size = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"]
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    {before}
    (folder / f"ready-{{attempt}}-{{rank}}-of-{{size}}").touch()
    while len(list(folder.glob(f"ready-{{attempt}}-*"))) < int(size):
        time.sleep(0.02)
    if rank == "1":
        {then}
    time.sleep(600)
"""


def waiting(launches: Launches, then: str = "pass", before: str = "pass") -> str:
    return launches.script(WAIT.format(then=then, before=before))


def left_on(hosts: Lab, job: Job) -> list[str]:
    """Command lines of the job's processes, on the hosts and here."""
    marked = [pid for host in hosts.hosts for pid in host.processes() if "launcher" in command_of(pid) or "sleep 600" in command_of(pid)]
    return [command_of(pid) for pid in {*marked, *job.alive()}]


def nothing_left(hosts: Lab, job: Job, bound: float) -> bool:
    return wait_until(lambda: not left_on(hosts, job), bound)


def test_ranks_of_three_hosts_meet_in_the_order_of_the_file(launches: Launches, hosts: Lab) -> None:
    names = launches.folder / "hosts"
    names.write_text("# order is not that of the addresses\nn3 slots=1\n\nn[1-2] slots=1  # two\n")
    job = hosts.start(launches, "--hostfile", str(names), launches.script(SUM))
    assert job.finish() == 0, job.err
    first = hosts.hosts[2].address
    assert sorted(job.out.splitlines()) == [
        f"[rank0] n3 6 0 0 3 1 {first} eth7", f"[rank1] n1 6 1 0 3 1 {first} eth7", f"[rank2] n2 6 2 0 3 1 {first} eth7",
    ]  # fmt: skip
    assert nothing_left(hosts, job, 2)


ODD = {
    "MY_TEXT": "a  b 'q' \"d\" $HOME `x` \\ é\n second line\n", "MY_EMPTY": "", "MY_BYTES": "\udcff\udcfe",
    "NCCL_ODD": "a;b&&c | (d) #e\t!f",
}  # fmt: skip


def test_environment_arguments_and_folder_arrive_as_they_are(launches: Launches, hosts: Lab) -> None:
    (launches.folder / ".zero_env").write_text("# by list\nMY_TEXT\nMY_EMPTY\nMY_BYTES\nMY_LINE= a 'b' \"c\" $HOME  \n")
    script = launches.script("""
        import json, os, sys, time
        names = ("MY_TEXT", "MY_EMPTY", "MY_BYTES", "MY_LINE", "NCCL_ODD", "MY_SECRET", "MY_OTHER", "CUDA_VISIBLE_DEVICES")
        seen = {n: os.environ.get(n) for n in names}
        seen |= {"argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable, "path": "/some/where" in sys.path}
        json.dump(seen, open(os.path.join(os.environ["FOLDER"], "seen-" + os.environ["RANK"]), "w"))
        while not os.path.exists(os.path.join(os.environ["FOLDER"], "go")):
            time.sleep(0.02)
    """)
    job = hosts.start(
        launches, "--env", "MY_SECRET=pass word", "--env", "FOLDER", "--hostfile", hosts.hostfile(launches.folder, count=2), script,
        "two words", "$x", "--nproc",
        env={**ODD, "MY_OTHER": "stays", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "/some/where"},
    )  # fmt: skip
    launches.wait_for("seen-0", "seen-1")
    shown = [command_of(int(pid)) for pid in filter(str.isdigit, os.listdir("/proc"))]
    (launches.folder / "go").touch()
    assert job.finish() == 0, job.err
    for rank in "01":
        seen = json.loads((launches.folder / f"seen-{rank}").read_text())
        assert {name: seen[name] for name in ODD} == ODD
        assert seen["MY_LINE"] == " a 'b' \"c\" $HOME  " and seen["MY_SECRET"] == "pass word"
        assert seen["MY_OTHER"] is None and seen["CUDA_VISIBLE_DEVICES"] is None and seen["path"]
        assert seen["argv"] == ["two words", "$x", "--nproc"] and seen["cwd"] == str(launches.folder)
    mine = [line for line in shown if "launcher" in line and "pytest" not in line.split(" ")[2:3]]
    assert mine and not any("second line" in line or ("pass word" in line and "zerorun" not in line) for line in mine)


def test_a_rank_that_fails_ends_all_hosts(launches: Launches, hosts: Lab) -> None:
    then = "os.kill(os.getpid(), signal.SIGKILL)"
    job = hosts.start(launches, "--env", "FOLDER", "--hostfile", hosts.hostfile(launches.folder), waiting(launches, then))
    launches.wait_for("ready-0-1-of-3")
    assert job.finish(10) == 137
    assert "rank 1 failed first (host n2" in job.err and "killed by SIGKILL" in job.err and job.err.count("failed first") == 1
    assert nothing_left(hosts, job, 2)


def test_a_signal_lets_the_ranks_of_all_hosts_save(launches: Launches, hosts: Lab) -> None:
    number = signal.SIGINT
    save = "(folder / f'saved-{rank}').touch(), sys.exit(0)"
    text = waiting(launches, before=f"signal.signal(signal.{number.name}, lambda *_: ({save}))")
    job = hosts.start(launches, "--env", "FOLDER", "--hostfile", hosts.hostfile(launches.folder, count=2), text)
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    job.process.send_signal(number)
    assert job.finish(10) == 128 + number
    launches.wait_for("saved-0", "saved-1", bound=0)
    assert nothing_left(hosts, job, 2)


def test_a_killed_launcher_leaves_nothing_anywhere(launches: Launches, hosts: Lab) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    argv = ("--env", "FOLDER", "--grace", "2", "--hostfile", hosts.hostfile(launches.folder, count=2))
    job = hosts.start(launches, *argv, waiting(launches, before=ignore))
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    job.process.kill()
    assert nothing_left(hosts, job, 10)


@pytest.mark.parametrize(("what", "code", "shown"), [
    ("launcher.agent", 137, "the agent that starts the ranks on n2 ended (killed by SIGKILL)"),
    ("launcher.node", 1, "host n2 is lost: its node ended"),
    ("sshd", 1, "host n2 is lost: "),
])  # fmt: skip
def test_what_guards_the_ranks_of_a_host_is_killed(launches: Launches, hosts: Lab, what: str, code: int, shown: str) -> None:
    job = hosts.start(launches, "--env", "FOLDER", "--hostfile", hosts.hostfile(launches.folder, count=2), waiting(launches))
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    host = hosts.hosts[1]
    victims = host.sshds() if what == "sshd" else host.find(what)
    assert victims
    for pid in victims:
        kill(pid)
    try:
        assert job.finish(10) == code
        assert shown in job.err
        assert nothing_left(hosts, job, 10)
    finally:
        if what == "sshd":
            serve(host)


def test_a_host_that_is_cut_off_ends_the_job_on_both_sides(launches: Launches, hosts: Lab) -> None:
    job = hosts.start(launches, "--env", "FOLDER", "--hostfile", hosts.hostfile(launches.folder, count=2), waiting(launches))
    launches.wait_for("ready-0-0-of-2", "ready-0-1-of-2")
    hosts.hosts[1].link("down")
    try:
        assert job.finish(10) == 1
        assert "host n2 is lost: nothing was heard of it for 4 s" in job.err
        assert nothing_left(hosts, job, 10)
    finally:
        hosts.hosts[1].link("up")


def test_hosts_that_cannot_be_started_are_named_with_the_reason(launches: Launches, hosts: Lab) -> None:
    (launches.folder / "hosts").write_text("n1 slots=1\nn2 port=2\nnowhere.invalid\n")
    job = hosts.start(launches, "--connect-timeout", "20", "--hostfile", "hosts", launches.script("pass"))
    assert job.finish(30) == 1
    assert "host n2 could not be started: ssh: connect to host" in job.err and "Connection refused" in job.err
    assert "host nowhere.invalid could not be started: ssh: Could not resolve" in job.err and "host n1" not in job.err
    assert nothing_left(hosts, job, 2)


def test_a_host_key_that_is_not_known_is_refused_as_ssh_refuses_it(launches: Launches, hosts: Lab) -> None:
    (launches.folder / "known").write_text("")
    args = f"-o UserKnownHostsFile={launches.folder}/known -o GlobalKnownHostsFile=/dev/null"
    job = hosts.start(launches, "--launcher-args", args, "--hostfile", hosts.hostfile(launches.folder, count=1), launches.script("pass"))
    assert job.finish(30) == 1 and "Host key verification failed" in job.err


def test_what_is_missing_on_a_host_is_said(launches: Launches, hosts: Lab) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    job = hosts.start(launches, "--remote-python", "/no/python", "--hostfile", names, launches.script("pass"))
    assert job.finish(30) == 1 and "host n1 could not be started" in job.err and "/no/python" in job.err
    hidden = Path("/dev/shm/zr-only-here")  # every mount namespace of the lab shares it: hide it on one
    hidden.mkdir(exist_ok=True)
    try:
        subprocess.run(hosts.hosts[1].enter("mount", "-t", "tmpfs", "none", str(hidden.parent)), check=True)
        (hidden / "job.py").write_text("pass")
        job = hosts.start(launches, "--hostfile", names, "job.py", cwd=hidden)
        assert job.finish(30) == 1 and f"host n2 could not be started: the working folder {hidden} is not there on n2" in job.err
    finally:
        subprocess.run(hosts.hosts[1].enter("umount", str(hidden.parent)), check=True)
        shutil.rmtree(hidden)


def test_ranks_that_cannot_reach_the_first_host_are_told_which_way(launches: Launches, hosts: Lab) -> None:
    argv = ("--connect-timeout", "8", "--master-addr", "10.211.255.9", "--hostfile", hosts.hostfile(launches.folder, count=2))
    job = hosts.start(launches, *argv, launches.script("pass"))
    assert job.finish(30) == 1
    assert "n2 cannot reach the first host at 10.211.255.9:" in job.err and "--interface" in job.err


def test_check_finds_nothing_wrong_and_then_what_is(launches: Launches, hosts: Lab) -> None:
    names = hosts.hostfile(launches.folder, count=2)
    job = hosts.start(launches, "check", "--hostfile", names, "--master-port", "29455")
    assert job.finish(30) == 0, job.out + job.err
    lines = [line.split() for line in job.out.splitlines()]
    assert lines[1][:2] == ["n1", "yes"] and lines[2][:2] == ["n2", "yes"] and lines[1][-2:] == ["free", "yes"]
    assert float(lines[5][1]) > 1 and lines[-1] == "2 hosts, nothing wrong".split()
    there = launches.folder / "there"
    taken = subprocess.Popen(hosts.hosts[1].enter(sys.executable, "-c", LISTEN, str(there)))
    try:
        assert wait_until(there.exists, 10)
        (launches.folder / "hosts").write_text("n1\nn2\nn3 port=3\n")
        job = hosts.start(launches, "check", "--hostfile", names, "--master-port", "29455", "--folder", "/etc/..")
        assert job.finish(30) == 1
        assert "wrong: n2: port 29455 cannot be used: Address already in use" in job.out
        assert "wrong: n3: not reached: ssh: connect to host" in job.out and "wrong: n1" not in job.out
    finally:
        for pid in hosts.hosts[1].find("29455"):
            kill(pid)
        taken.wait()
    assert nothing_left(hosts, job, 2)


LISTEN = "import socket, sys, time; s = socket.socket(); s.bind(('', 29455)); s.listen(); open(sys.argv[1], 'w').close(); time.sleep(600)"
