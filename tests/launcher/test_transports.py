"""The commands that start nodes, what goes over a link, and what checks and completion print. No other hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.launcher.jobs import ZERORUN
from zeroengine.addresses import endpoint, unbracketed
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import network
from zeroengine.launcher.hosts import Host, filtered
from zeroengine.launcher.link import GREETING, Decoder, LinkError, Output, Writer, pack, pack_output
from zeroengine.launcher.plan import Job, Plan
from zeroengine.launcher.preflight import Findings, pairings, table
from zeroengine.launcher.transports import environment_of_step, mpi_command, open_transport, pdsh_command, srun_command, ssh_command

HOSTS = tuple(Host(f"n{i}", slots=(0, 1, 2, 3)) for i in (1, 2))


def job(transport: str, *args: str, hosts: Sequence[Host] = HOSTS) -> Job:
    return Job(Plan(0, "script", "a.py", env={"SECRET": "s3cret"}), tuple(hosts), transport, args, env={"TOKEN": "s3cret"})


def test_ssh() -> None:
    command = ssh_command(Host("fd00::1", "me", 2222), job("ssh", "-i", "key", "-o", "BatchMode=no"))
    assert command[:5] == ["ssh", "-i", "key", "-o", "BatchMode=no"]  # the user's come first: ssh keeps the first value
    assert command[-4:-1] == ["-p", "2222", "me@fd00::1"]
    assert command[-1].startswith(f"exec {sys.executable} -c ") and command[-1].endswith(" stdio")
    assert not any("StrictHostKeyChecking" in word or "KnownHosts" in word or "s3cret" in word for word in command)


def test_slurm_is_asked_for_what_is_left_of_the_allocation() -> None:
    left = filtered(HOSTS, None, "n1:0@n2")
    command = srun_command(left, job("slurm", "--mem=0"), "10.0.0.1", 5)
    assert command[: command.index("--overlap")] == ["srun", "--nodes", "1", "--ntasks", "1", "--ntasks-per-node", "1", "--nodelist", "n1"]
    assert "--mem=0" in command and "--include" not in command and "--exclude" not in command
    assert command[-4:] == ["dial", "10.0.0.1", "5", ""]
    step = environment_of_step({"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "1", "A": "b"})
    assert step == {"SLURM_JOB_ID": "1", "A": "b"}


def test_mpi_and_pdsh() -> None:
    command = mpi_command(HOSTS, job("mpi", "--mca", "x", "y"), "10.0.0.1", 5)
    assert command[:6] == ["mpirun", "--mca", "x", "y", "--bind-to", "none"]
    first, second = command[6:].index(":"), len(command[6:])
    assert command[6:][first + 1 : second][:6] == ["-np", "1", "--host", "n2:1", "-x", "ZERORUN_TOKEN"]
    assert [word for word in command if word in ("n1", "n2")] == ["n1", "n2"]  # what each is told that it is
    command = pdsh_command([Host("a", "me"), Host("b")], job("pdsh"), "10.0.0.1", 5, "/home/x/file")
    assert command[:7] == ["pdsh", "-R", "ssh", "-f", "2", "-w", "me@a,b"] and command[-1].endswith("dial 10.0.0.1 5 %h /home/x/file")
    assert not any("s3cret" in word for word in command)


def test_a_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name, program in (("ssh", "ssh"), ("pdsh", "pdsh"), ("mpi", "mpirun"), ("slurm", "srun")):
        with pytest.raises(ZeroEngineError, match=f"--launcher {name} needs {program}, which is not installed here"):
            open_transport(job(name))


def test_frames_survive_any_cut_and_noise_before_them() -> None:
    frames = [{"a": "\udcff é\n", "b": [1, None]}, Output(2, 3, b"\0\xff\n"), {"c": 1}]
    data = b"Welcome!\nzerorun link\n" + GREETING + b"".join(pack(f) if isinstance(f, dict) else pack_output(f) for f in frames)
    for size in (1, 7, len(data)):
        decoder, got = Decoder(), []
        for at in range(0, len(data), size):
            got += decoder.feed(data[at : at + size])
        assert got == frames and decoder.noise == b"Welcome!\nzerorun link\n"


def test_what_is_no_frame_is_an_error() -> None:
    for data in (b"X" * 9, b"M\0\0\0\x01[", b"M\xff\xff\xff\xff", b"O\0\0\0\x01x"):
        with pytest.raises(LinkError):
            Decoder().feed(GREETING + data)


def test_a_writer_never_waits_and_loses_nothing() -> None:
    read, write = os.pipe()
    writer, frame = Writer(write), pack({"text": "x" * 100_000})
    for _ in range(5):
        writer.put(frame)
    assert writer.waiting > 0
    got = b""
    while len(got) < 5 * len(frame):
        got += os.read(read, 1 << 20)
        writer.flush()
    assert got == frame * 5 and writer.waiting == 0
    os.close(read)
    writer.put(frame)
    assert writer.broken and writer.waiting == 0
    os.close(write)


def test_the_way_to_an_address() -> None:
    way = network.route("127.0.0.1")
    assert (way.interface, way.loopback, way.source) == ("lo", True, "127.0.0.1")
    assert network.is_local("localhost") and network.is_local("127.0.0.1") and not network.is_local("no.such.host.invalid")
    assert network.resolve("fe80::1%eth0") == "fe80::1" and endpoint("fe80::1", 5) == "[fe80::1]:5"
    assert [unbracketed(host) for host in ("[::1]", "::1", "node1", "[node]")] == ["::1", "::1", "node1", "[node]"]
    assert network.address_of("lo") == "127.0.0.1"
    with pytest.raises(ZeroEngineError, match="no such interface"):
        network.address_of("nope0")
    with pytest.raises(ZeroEngineError, match="has no address here"):
        network.resolve("no.such.host.invalid")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7])
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(count: int) -> None:
    rounds = list(pairings(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)


def test_the_table() -> None:
    found = Findings([("a", "yes", "3.11", "2.13", "+0.00 s", "-", "yes"), ("bb", "no", *"-----")], {(0, 1): "900"}, ["bb: not reached: x"])
    lines = table(found, ["a", "bb"]).splitlines()
    assert lines[0] == "host  reached  python  torch  clock    port  folder" and lines[2].split() == ["bb", "no", *"-----"]
    assert lines[5].split() == ["a", "900"] and lines[-1] == "wrong: bb: not reached: x"


def test_help_starts_without_torch() -> None:
    slow = "'torch' in sys.modules or 'pydantic' in sys.modules"
    code = f"import sys; from zeroengine.launcher.cli import main; main(['--help']); sys.exit({slow})"
    root = os.path.dirname(os.path.dirname(ZERORUN))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "--hostfile FILE" in done.stdout and "  check " in done.stdout


def complete(line: str, cwd: str) -> list[str]:
    """What bash would offer at the end of `line`."""
    words = line.split(" ")
    script = subprocess.run([sys.executable, ZERORUN, "completion", "bash"], capture_output=True, text=True, check=True, timeout=30).stdout
    quoted = " ".join(f"'{word}'" for word in words)
    probe = f"{script}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n_zerorun\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    return subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True, cwd=cwd, timeout=30).stdout.split()


def test_completion_in_bash(tmp_path: os.PathLike[str]) -> None:
    cwd = str(tmp_path)
    open(os.path.join(cwd, "train.py"), "w").close()
    assert complete("zerorun --launcher s", cwd) == ["ssh", "slurm"]
    assert complete("zerorun --host", cwd) == ["--hostfile"]
    assert complete("zerorun che", cwd) == ["check"]
    assert complete("zerorun --hostfile t", cwd) == ["train.py"] and complete("zerorun --tee t", cwd) == ["train.py"]


def test_completion_of_other_shells() -> None:
    for shell, text in (("zsh", "bashcompinit"), ("fish", "complete -c zerorun -l launcher -x -a 'auto local")):
        done = subprocess.run([sys.executable, ZERORUN, "completion", shell], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and text in done.stdout
        if shutil.which(shell):
            subprocess.run([shell, "-c", "source /dev/stdin"], input=done.stdout, text=True, check=True, timeout=30)
    wrong = subprocess.run([sys.executable, ZERORUN, "completion", "tcsh"], capture_output=True, text=True, timeout=30)
    assert wrong.returncode == 2 and "completion bash|zsh|fish" in wrong.stderr
