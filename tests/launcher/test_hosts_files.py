"""Which hosts and slots a hostfile and its filters give."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import options
from zeroengine.launcher.environment import DEVICES
from zeroengine.launcher.hosts import Host, filtered, limited, parse_hostfile, read_hostfile, visible_devices
from zeroengine.launcher.preparing import prepare


def slots(n: int) -> tuple[int, ...]:
    return tuple(range(n))


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("a slots=2", [Host("a", slots=slots(2))]),
        ("  a   slots=2   # comment", [Host("a", slots=slots(2))]),
        ("a", [Host("a")]),
        ("me@a:2222 slots=1", [Host("a", "me", 2222, (0,))]),
        ("a port=2222 user=me", [Host("a", "me", 2222)]),
        ("n[01-03,7].x slots=1", [Host(f"n{i}.x", slots=(0,)) for i in ("01", "02", "03", "7")]),
        ("r[1-2]n[08-10]", [Host(f"r{r}n{n}") for r in "12" for n in ("08", "09", "10")]),
        ("fd00::1 slots=1", [Host("fd00::1", slots=(0,))]),
        ("me@[fd00::1]:22", [Host("fd00::1", "me", 22)]),
        ("[fe80::1%eth0]", [Host("fe80::1%eth0")]),
        ("FD00:0::1", [Host("fd00::1")]),
        ("10.0.0.1\tslots=1", [Host("10.0.0.1", slots=(0,))]),
        ("a slots=0\nb", [Host("b")]),
        ("\n# nothing\n\na\r\nb\n", [Host("a"), Host("b")]),
    ],
)
def test_lines(line: str, hosts: list[Host]) -> None:
    assert list(parse_hostfile(line, "hosts")) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a lots=8", "hosts:1: 'a lots=8': 'lots=8' is no setting of a host; did you mean `slots`?"),
        ("a 8", "'8' is no setting of a host"),
        ("a slots=many", "slots=many: a number from 0"),
        ("a slots=-1", "slots=-1"),
        ("a slots=1 slots=2", "slots= is given twice"),
        ("\na\nb\na", "hosts:4: 'a': host a is in line 2 already"),
        ("a:0", "port=0: a number from 1 to 65535"),
        ("a b", "'b' is no setting"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no name of a host"),
        ("a;b", "'a;b' is no name of a host"),
        ("-u@a", "'-u' is no name of a user"),
        ("n[3-1]", "no list of numbers and ranges"),
        ("n[1-", "'n[1-' is no name of a host"),
        ("n[0-99999999]", "stands for more than"),
        ("[fd00::1", "is no address"),
        ("fd00::xyz", "no IPv6 address"),
        ("fd00::1::2", "no IPv6 address"),
        ("fe80::1%a;b", "no IPv6 address"),
        ("fd00::1\n[FD00:0:0::1]:22", "hosts:2: '[FD00:0:0::1]:22': host fd00::1 is in line 1 already"),
        ("# only a comment\n", "hostfile hosts names no host"),
        ("", "names no host"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ZeroEngineError) as caught:
        parse_hostfile(text, "hosts")
    assert message in str(caught.value)


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroEngineError, match="cannot be read: No such file"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"a\xff")
    with pytest.raises(ZeroEngineError, match="is no text"):
        read_hostfile(str(tmp_path / "bytes"))


TWO = (Host("a", slots=slots(4)), Host("b", slots=slots(4)), Host("fd00::1", slots=slots(2)))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "fd00::1": (0, 1)}),
        ("b@a:0,2", None, {"a": (0, 2), "b": (0, 1, 2, 3)}),
        ("a:1-3", None, {"a": (1, 2, 3)}),
        ("[fd00::1]:1", None, {"fd00::1": (1,)}),
        (None, "b", {"a": (0, 1, 2, 3), "fd00::1": (0, 1)}),
        (None, "a:0-3@b:1", {"b": (0, 2, 3), "fd00::1": (0, 1)}),
    ],
)
def test_filters(include: str | None, exclude: str | None, left: dict[str, tuple[int, ...]]) -> None:
    assert {host.name: host.slots for host in filtered(TWO, include, exclude)} == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("c", None, "no host c in the list of hosts"),
        ("a:4", None, "host a has no slot 4; its slots are 0, 1, 2, 3"),
        ("a:x", None, "[x] is no list of numbers"),
        ("a@a", None, "host a is given twice"),
        ("", None, "--include ''"),
        ("a", "b", "exclude each other"),
        (None, "a@b@[fd00::1]", "leaves no slot"),
        (None, "zz", "no host zz"),
    ],
)
def test_filters_that_fit_nothing(include: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(ZeroEngineError) as caught:
        filtered(TWO, include, exclude)
    assert message in str(caught.value)


def test_ranges_in_filters_and_unknown_slots() -> None:
    hosts = parse_hostfile("n[1-3]", "hosts")
    assert [(h.name, h.slots) for h in filtered(hosts, "n[2-3]:0,5", None)] == [("n2", (0, 5)), ("n3", (0, 5))]
    with pytest.raises(ZeroEngineError, match="how many slots n1 has is not known"):
        filtered(hosts, None, "n1:0")


def test_fewer_hosts_and_slots() -> None:
    assert [(h.name, h.slots) for h in limited(TWO, 2, 2)] == [("a", (0, 1)), ("b", (0, 1))]
    assert limited((Host("a"),), None, 3)[0].slots == (0, 1, 2)
    with pytest.raises(ZeroEngineError, match="--nnodes 4, but there are 3 hosts: a, b, fd00::1"):
        limited(TWO, 4, None)
    with pytest.raises(ZeroEngineError, match="--nproc 3, but fd00::1 has 2 slots"):
        limited(TWO, None, 3)


@pytest.mark.parametrize(
    ("visible", "chosen", "value"),
    [
        (None, (0, 1), "0,1"), (None, (2,), "2"), ("0,2", (0, 1), "0,2"), ("0,2", (1,), "2"), ("4,5", (0,), "4"), ("4,5", (1,), "5"),
        ("4, 5", (1, 0), "5,4"), ("GPU-ab,GPU-cd", (1,), "GPU-cd"),
    ],
)  # fmt: skip
def test_slots_index_the_visible_devices(visible: str | None, chosen: tuple[int, ...], value: str) -> None:
    assert visible_devices(visible, chosen) == value


@pytest.mark.parametrize("visible", [None, "0,2", "4,5"])
@pytest.mark.parametrize("hostfile", [False, True])
@pytest.mark.parametrize(("option", "value", "expected"), [
    (None, None, {None: None, "0,2": "0,2", "4,5": "4,5"}),  # nothing chosen: the variable is left as it is
    ("--include", "localhost:1", {None: "1", "0,2": "2", "4,5": "5"}),
    ("--include", "localhost:0-1", {None: "0,1", "0,2": "0,2", "4,5": "4,5"}),
    ("--exclude", "localhost:0", {None: "1", "0,2": "2", "4,5": "5"}),
])  # fmt: skip
def test_what_the_ranks_of_a_host_see(
    visible: str | None, hostfile: bool, option: str | None, value: str | None, expected: dict[str | None, str | None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    argv = [*(["--hostfile", "hosts"] if hostfile else ["--nproc", "2"]), *([option, value] if option and value else [])]
    argv = argv if hostfile or option != "--include" else argv[2:]  # the slots say how many
    job = job_of(tmp_path, monkeypatch, "localhost slots=2\n", *argv)
    for name in DEVICES:
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (host,) = job.hosts
    told = {"slots": host.slots, "chosen": host.chosen, "cwd": str(tmp_path), "env": {}, "remote": False}
    ready = prepare({**told, "plan": dataclasses.asdict(job.plan)}, None)
    assert (ready.env | ready.plan.env).get("CUDA_VISIBLE_DEVICES") == expected[visible]
    assert ready.plan.nproc == (2 if option is None or value == "localhost:0-1" else 1)


@pytest.mark.parametrize("visible", ["0,2", "4,5", ""])
def test_a_slot_beyond_the_visible_devices_is_refused(visible: str) -> None:
    with pytest.raises(ValueError, match="slot 2 is not there: the visible devices are"):
        visible_devices(visible, (2,))


def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *argv: str) -> options.Job:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    (tmp_path / "hosts").write_text(text)
    return options.parse([*argv, "job.py"])


def test_a_command_line_with_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a slots=2\nb slots=2\n"
    argv = ("--hostfile", "hosts", "--include", "b:1@a", "--launcher_args", "-v -i 'my key'", "--show", "2")
    job = job_of(tmp_path, monkeypatch, text, *argv)
    assert job.transport == "ssh" and job.transport_args == ("-v", "-i", "my key")
    assert [(h.name, h.slots, h.chosen) for h in job.hosts] == [("a", (0, 1), False), ("b", (1,), True)]
    assert (job.min_nodes, job.max_nodes, job.plan.show, job.plan.prefix) == (2, 2, (2,), True)
    assert "PATH" in job.env
    job = job_of(tmp_path, monkeypatch, text, "--hostfile", "hosts", "--num_nodes", "1:2", "--nproc", "1", "--launcher", "pdsh")
    assert (job.min_nodes, job.max_nodes, job.elastic, job.transport) == (1, 2, True, "pdsh")
    assert [h.slots for h in job.hosts] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hostfile", "none"], "--hostfile none cannot be read"),
        (["--hostfile", "hosts", "--include", "c"], "no host c"),
        (["--hostfile", "hosts", "--nnodes", "3"], "--nnodes 3, but there are 2 hosts"),
        (["--hostfile", "hosts", "--nnodes", "3:4"], "--nnodes 3:4, but there are 2 hosts"),
        (["--hostfile", "hosts", "--nnodes", "0"], "--nnodes 0: a number of hosts from 1"),
        (["--hostfile", "hosts", "--nnodes", "2:1"], "--nnodes 2:1"),
        (["--hostfile", "hosts", "--nnodes", "1:2", "--launcher", "mpi"], "mpirun ends all hosts when one is lost"),
        (["--hostfile", "hosts", "--no-ssh"], "every host starts the command itself"),
        (["--hostfile", "hosts", "--launcher", "local"], "leave --hostfile out"),
        (["--hostfile", "hosts", "--nproc", "9"], "--nproc 9, but a has 2 slots"),
        (["--hostfile", "hosts", "--show", "4"], "--show 4: the ranks are 0 to 3"),
        (["--hostfile", "hosts", "--launcher-args", "'"], "--launcher-args"),
        (["--hostfile", "hosts", "--node-timeout", "0"], "--node-timeout 0"),
        (["--hostfile", "hosts", "--elastic-config", "none.json"], "no such file"),
        (["--launcher", "ssh"], "--launcher ssh needs --hostfile"),
        (["--launcher", "rsh"], "invalid choice: 'rsh'"),
        (["--launcher", "slurm"], "SLURM_JOB_NODELIST is not set"),
        (["--nnodes", "2"], "which hosts? give --hostfile"),
        (["--master-addr", "x"], "--master-addr needs several hosts"),
        (["--no-ssh"], "how many hosts?"),
        (["--no-ssh", "--nnodes", "2"], "which of the hosts is this?"),
        (["--no-ssh", "--nnodes", "2", "--node-rank", "1"], "where is host 0?"),
        (["--no-ssh", "--nnodes", "2", "--node-rank", "2", "--master-addr", "x"], "--node-rank 2: the hosts are 0 to 1"),
        (["--include", "other:0"], "no host other"),
        (["--nproc", "1", "--include", "localhost:0,1"], "--nproc 1, but --include localhost:0,1 has 2 slots"),
    ],
)
def test_a_command_line_that_is_refused(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ZeroEngineError) as caught:
        job_of(tmp_path, monkeypatch, "a slots=2\nb slots=2\n", *argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_ranks_from_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = '{"elasticity": {"enabled": true, "max_train_batch_size": 4, "micro_batch_sizes": [1]}}'
    (tmp_path / "ds.json").write_text(section)
    job = job_of(tmp_path, monkeypatch, "a\nb\n", "--hostfile", "hosts", "--nnodes", "1:2", "--elastic-config", "ds.json")
    assert job.sizes == (1, 2, 4)
