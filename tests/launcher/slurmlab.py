"""A real Slurm on the hosts of the lab: one slurmctld here, a slurmd on each host, munge between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launcher.jobs import wait_until
from tests.launcher.netlab import Lab, kill
from tests.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "sbatch", "srun", "scancel", "sinfo")


def missing() -> str | None:
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else None


def configuration(lab: Lab, folder: Path) -> str:
    nodes = "".join(
        f"NodeName={h.name} NodeAddr={h.address} CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1\n" for h in lab.hosts
    )
    return (
        textwrap.dedent(f"""\
        ClusterName=lab
        SlurmctldHost={os.uname().nodename}({lab.subnet}.254)
        SlurmUser=root
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge.sock
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        JobAcctGatherType=jobacct_gather/none
        SchedulerType=sched/builtin
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool-%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd-%n.pid
        SlurmctldLogFile={folder}/slurmctld.log
        SlurmdLogFile={folder}/slurmd-%n.log
        SlurmctldPort={free_port()}
        SlurmdPort={free_port()}
        MpiDefault=none
        ReturnToService=2
        MailProg=/bin/true
        KillWait=8
        PartitionName=all Nodes=ALL Default=YES State=UP
    """)
        + nodes
    )


@contextmanager
def slurm(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """The environment with which its commands find it."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    os.chmod(folder / "munge.key", 0o600)
    os.chmod(folder, 0o755)
    conf = folder / "slurm.conf"
    conf.write_text(configuration(lab, folder))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    munge = ["munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock", f"--pid-file={folder}/munged.pid"]
    try:
        for command in (
            [*munge, f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"],
            ["slurmctld", "-f", str(conf)],
            *(host.enter("slurmd", "-f", str(conf), "-N", host.name) for host in lab.hosts),
        ):
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=20)
        if not wait_until(lambda: idle(env) == len(lab.hosts), 20):
            raise TimeoutError(f"Slurm does not come up: {(folder / 'slurmctld.log').read_text()[-2000:]}")
        yield {"SLURM_CONF": str(conf)}
    finally:
        for host in lab.hosts:
            for pid in host.find("slurmd"):
                kill(pid)
        for name in ("slurmctld.pid", "munged.pid"):
            if (folder / name).exists():
                kill(int((folder / name).read_text()))


def idle(env: dict[str, str]) -> int:
    shown = subprocess.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=env, capture_output=True, text=True, timeout=20)
    return len(set(shown.stdout.split()))
