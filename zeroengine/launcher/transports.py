"""How a node is started on each host. One that the launcher runs itself, and ssh, give a pipe to each node; the others start
all nodes with one command, and these dial back."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import dialling, network
from zeroengine.launcher.hosts import Host
from zeroengine.launcher.link import Writer
from zeroengine.launcher.localrun import ROOT, START
from zeroengine.launcher.member import Member
from zeroengine.launcher.plan import Job

NODE = START.format(module="node")
COMMANDS = {"ssh": "ssh", "pdsh": "pdsh", "mpi": "mpirun", "slurm": "srun"}
PACKAGES = {"ssh": "openssh-client", "pdsh": "pdsh", "mpi": "Open MPI (openmpi-bin)", "slurm": "Slurm"}


class Transport(Protocol):
    """`token` proves to each other that nodes which dial and the launcher belong to one job; empty where nobody dials."""

    token: str

    @property
    def listener(self) -> socket.socket | None: ...

    @property
    def process(self) -> subprocess.Popen[bytes] | None: ...

    def start(self, members: Sequence[Member]) -> None:
        """Begins to start nodes on these hosts."""

    def close(self) -> None:
        """Ends what carries the links of all hosts together."""


def start_here(member: Member) -> None:
    """A node on this host, linked by two pipes."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, ROOT, "link", str(theirs_in), str(theirs_out)],
        pass_fds=(theirs_in, theirs_out),
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    member.attach(ours_in, Writer(ours_out), process=process)


def node_command(python: str, *how: str) -> list[str]:
    return [python, "-c", NODE, ROOT, *how]


def ssh_command(host: Host, job: Job) -> list[str]:
    """The user's own arguments come first: of two values for an option ssh takes the first. Nothing is said about host keys:
    what ssh's configuration says about them holds."""
    remote = "exec " + shlex.join(node_command(job.remote_python or sys.executable, "stdio"))
    port = ["-p", str(host.port)] if host.port is not None else []
    patience = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(job.connect_timeout))}"]
    return ["ssh", *job.transport_args, *patience, "-T", *port, host.target, remote]


class Ssh:
    """A pipe to each host, through OpenSSH; a node on this very host is started without it."""

    token, listener, process = "", None, None

    def __init__(self, job: Job) -> None:
        self._job = job

    def start(self, members: Sequence[Member]) -> None:
        for member in members:
            if not member.remote:
                start_here(member)
                continue
            process = subprocess.Popen(
                ssh_command(member.host, self._job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            if process.stdin is None or process.stdout is None or process.stderr is None:
                raise ZeroEngineError("ssh has no pipes")
            ends = [os.dup(file.fileno()) for file in (process.stdout, process.stdin, process.stderr)]
            for file in (process.stdout, process.stdin, process.stderr):
                file.close()
            member.attach(ends[0], Writer(ends[1]), ends[2], process)

    def close(self) -> None:
        return None


def pdsh_command(hosts: Sequence[Host], job: Job, address: str, port: int, file: str) -> list[str]:
    """pdsh has no way to pass a secret but a file; `%h` is each host's name. All must run at the same time."""
    names = ",".join(host.target for host in hosts)
    command = "exec " + shlex.join(node_command(job.remote_python or sys.executable, "dial", address, str(port), "%h", file))
    return ["pdsh", "-R", "ssh", *job.transport_args, "-f", str(len(hosts)), "-w", names, command]


def mpi_command(hosts: Sequence[Host], job: Job, address: str, port: int) -> list[str]:
    """One process on each host, free to use all its cores. Its name tells which host it is on."""
    python = job.remote_python or sys.executable
    parts: list[str] = []
    for host in hosts:
        place = ["-np", "1", "--host", f"{host.name}:1", "-x", dialling.TOKEN]  # each part has an environment of its own
        parts += [*([":"] if parts else []), *place, *node_command(python, "dial", address, str(port), host.name)]
    return ["mpirun", *job.transport_args, "--bind-to", "none", *parts]


def srun_command(hosts: Sequence[Host], job: Job, address: str, port: int) -> list[str]:
    """One task on each host that is left of the allocation, beside other steps, with all cores. Slurm says its name there."""
    python, count = job.remote_python or sys.executable, str(len(hosts))
    step = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(host.name for host in hosts)]
    rules = ["--overlap", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL", "--unbuffered"]
    return ["srun", *step, *rules, *job.transport_args, *node_command(python, "dial", address, str(port), "")]


class OneCommand:
    """pdsh, mpirun or srun: one command for all hosts, whose nodes dial back."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.token = secrets.token_hex(32)
        self.process: subprocess.Popen[bytes] | None = None
        self._file: Path | None = None
        self.address = own_address(job)
        self.listener: socket.socket | None = dialling.listen("", 0)

    def start(self, members: Sequence[Member]) -> None:
        if self.listener is None or self.process is not None:
            return  # the command ran once, for all; a host that it lost does not come back
        hosts, port = [member.host for member in members], self.listener.getsockname()[1]
        if self._job.transport == "pdsh":
            self._file = self._shared_file()
            command = pdsh_command(hosts, self._job, self.address, port, str(self._file))
        elif self._job.transport == "mpi":
            command = mpi_command(hosts, self._job, self.address, port)
        else:
            command = srun_command(hosts, self._job, self.address, port)
        self.process = subprocess.Popen(
            command,
            env=environment_of_step(os.environ) | {dialling.TOKEN: self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _shared_file(self) -> Path:
        folder = Path(os.environ.get("ZERORUN_SHARED") or Path.home() / ".cache" / "zeroengine")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"job-{secrets.token_hex(8)}"
            path.touch(0o600)
            path.write_text(self.token)
        except OSError as error:
            raise ZeroEngineError(f"the secret for pdsh cannot be written to {folder}: {error.strerror}") from None
        return path

    def close(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self.listener is not None:
            self.listener.close()
        if self.process is not None:
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process.terminate()  # mpirun and srun then end what they started
            try:
                self.process.wait(3.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Dialled:
    """The user, or a cluster's own means, starts the command on each host; the others dial the first."""

    process = None

    def __init__(self, job: Job) -> None:
        self.token = os.environ.get(dialling.TOKEN, "")
        # All addresses of this host, since the one that others use may be a translated one (a service of Kubernetes).
        self.listener: socket.socket | None = dialling.listen("", job.plan.master_port)

    def start(self, members: Sequence[Member]) -> None:
        for member in members:
            if not member.remote:
                start_here(member)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


def environment_of_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Options of the allocation (sbatch) that srun would take as its own, and that contradict one task on each host."""
    names = ("NTASKS", "NPROCS", "NTASKS_PER_NODE", "TASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "DISTRIBUTION",
             "CPUS_PER_TASK", "GPUS_PER_TASK", "NTASKS_PER_GPU")  # fmt: skip
    return {name: value for name, value in environ.items() if name not in {f"SLURM_{n}" for n in names}}


def own_address(job: Job) -> str:
    """This host's address as the other hosts reach it: the one from which the kernel would send to them."""
    if job.launcher_addr is not None:
        return network.resolve(job.launcher_addr)
    reasons: list[str] = []
    for host in job.hosts:
        try:
            way = network.route(network.resolve(host.name))
        except (OSError, ZeroEngineError) as error:
            reasons.append(str(error))
            continue
        if way.source is not None and not way.loopback:
            return way.source
    if len(reasons) < len(job.hosts):
        return "127.0.0.1"  # all hosts are this one
    try:
        address = network.resolve(os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname())
    except ZeroEngineError:
        address = "127.0.0.1"
    if network.is_loopback(address):
        raise ZeroEngineError(f"at which address the hosts reach this one is not known ({reasons[0]}); give it with --launcher-addr")
    return address


def open_transport(job: Job) -> Transport:
    """Raises `ZeroEngineError` where its program is not installed."""
    if job.transport == "none":
        return Dialled(job)
    if job.transport == "local":
        return Ssh(job)
    program = COMMANDS[job.transport]
    if shutil.which(program) is None:
        raise ZeroEngineError(f"--launcher {job.transport} needs {program}, which is not installed here ({PACKAGES[job.transport]})")
    if job.transport == "ssh":
        return Ssh(job)
    if job.transport in ("pdsh", "mpi") and (bare := [h.name for h in job.hosts if ":" in h.name]):
        told = f"--launcher {job.transport}: {program} cannot have the IPv6 address {bare[0]} in its list of hosts"
        raise ZeroEngineError(f"{told}; give the host a name (in DNS or /etc/hosts), or use --launcher ssh")
    if job.transport == "mpi" and (odd := [h.name for h in job.hosts if h.user or h.port]):
        raise ZeroEngineError(f"--launcher mpi: user and port of {odd[0]} belong into ~/.ssh/config, where mpirun's ssh finds them")
    return OneCommand(job)
