"""What is taken from the environment: variables that go along, and places that schedulers give. No processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher.environment import asked, by_rule, listed, parse_list, without_step
from zeroengine.launcher.hosts import Host
from zeroengine.launcher.schedulers import Place, in_slurm_allocation, in_slurm_step, place, slurm_hosts, split_nodelist


def test_rules() -> None:
    here = {
        "PATH": "/bin", "PYTHONPATH": "/a b", "NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "ZE_COMM": "gloo", "LC_ALL": "C",
        "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/h",
        "SSH_AUTH_SOCK": "s",
        "SLURM_JOB_ID": "1", "ZERORUN_TOKEN": "x", "PWD": "/", "AWS_SECRET": "x",
    }  # fmt: skip
    assert set(by_rule(here)) == {"PATH", "PYTHONPATH", "NCCL_DEBUG", "HF_TOKEN", "ZE_COMM", "LC_ALL", "OMP_NUM_THREADS"}
    step = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "ZERORUN_TOKEN": "x", "OMPI_MCA_btl": "tcp"}
    assert without_step(step) == {"OMPI_MCA_btl": "tcp"}


def test_the_list() -> None:
    here = {"A": "1\n2 '\"$", "B_1": "x", "B_2": "y"}
    text = "# comment\n\nA\nB_*\nC= a 'b' \"c\" $A \\n \n  D=e=f#g\nE=\nF=x\r\n"
    assert parse_list(text, "f", here) == {**here, "C": " a 'b' \"c\" $A \\n ", "D": "e=f#g", "E": "", "F": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("A=1\nB", "f:2: B is not set here"), ("=1", "'' is no name"), ("A B=1", "'A B' is no name"), ("a b", "'a b' is no name")],
)
def test_a_list_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ZeroEngineError) as caught:
        parse_list(text, "f", {})
    assert message in str(caught.value)


def test_lists_of_several_folders(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".zero_env").write_text("A=1\nB=1\n")
    (tmp_path / ".zero_env").write_bytes(b"B=2\nC=\xff\n")
    assert listed([tmp_path / "home", tmp_path, tmp_path / "none"], {}) == {"A": "1", "B": "2", "C": "\udcff"}


def test_asked_for() -> None:
    assert asked(["A=1=2", "B", "X_*", "A=3"], {"B": "b\n", "X_1": "1", "X_2": "2"}) == {"A": "3", "B": "b\n", "X_1": "1", "X_2": "2"}


@pytest.mark.parametrize(
    ("text", "names"),
    [("n1", "n1"), ("n[1-3,7],m2", "n1 n2 n3 n7 m2"), ("a[01-02]b[1-2]", "a01b1 a01b2 a02b1 a02b2"), ("a,b", "a b"), ("", "")],
)
def test_short_lists_of_slurm(text: str, names: str) -> None:
    assert list(split_nodelist(text)) == names.split()


# As Slurm 22.05 set them for `salloc -N2`, and in a task of `srun -N2`; the rest of what it sets has no part in this.
SALLOC = {"SLURM_JOB_ID": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
SRUN = SALLOC | {
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1", "SLURM_PROCID": "1",
}  # fmt: skip


def test_what_slurm_allocated() -> None:
    assert in_slurm_allocation(SALLOC) and not in_slurm_step(SALLOC) and in_slurm_step(SRUN) and not in_slurm_allocation(SRUN)
    assert not in_slurm_step(SALLOC | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"})  # the shell of salloc
    assert slurm_hosts(SALLOC) == (Host("n1", slots=(0,)), Host("n2", slots=(0,)))
    assert [h.slots for h in slurm_hosts(SALLOC | {"SLURM_TASKS_PER_NODE": "2,1"})] == [(0, 1), (0,)]
    assert [h.slots for h in slurm_hosts(SALLOC | {"SLURM_NTASKS_PER_NODE": "2"})] == [(0, 1), (0, 1)]
    assert [h.slots for h in slurm_hosts(SALLOC | {"SLURM_GPUS_ON_NODE": "8"})] == [None, None]  # each host counts them
    with pytest.raises(ZeroEngineError, match="start zerorun inside salloc or sbatch"):
        slurm_hosts({})
    with pytest.raises(ZeroEngineError, match="cannot be read"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n[1-"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Place()),
        (SRUN, Place(1, 2, "n1", 20002)),
        (SRUN | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, Place(1, 2, "m", 5)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Place(1, 3)),
        ({"PET_NODE_RANK": "2", "PET_NNODES": "4", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "23456"}, Place(2, 4, "m", 23456)),
        ({"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "job-0.svc"}, Place(3, None, "job-0.svc")),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "m"}, Place(0, 2, "m")),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "1"}, Place(None, None, "m", 1)),
    ],
)
def test_this_hosts_place(environ: dict[str, str], expected: Place) -> None:
    assert place(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4"}, "srun started zerorun 4 times on 2 nodes"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun started zerorun 2 times on this host"),
        ({"NODE_RANK": "one"}, "NODE_RANK='one' is not a number"),
    ],
)
def test_places_that_make_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ZeroEngineError) as caught:
        place(environ)
    assert message in str(caught.value)
