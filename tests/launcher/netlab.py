"""Hosts made on one machine: network, process and host-name namespaces on a bridge, an sshd of its own in each.

What runs "on" a host sees its own interfaces, its own name and its own processes; files are shared, as on a cluster with a
common file system. Root, and the programs ip, unshare, sshd and ssh are needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.launcher.jobs import Job, Launches, wait_until

NO_DETECTION = ("nodad",)  # IPv6: an address may be used at once, nobody else has it
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen")


def missing() -> str | None:
    """Why hosts cannot be made here, if so."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"needs {', '.join(absent)} (Debian: openssh-server, iproute2)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount", "true"], capture_output=True)
    return None if probe.returncode == 0 else "namespaces cannot be made here"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@dataclass
class LabHost:
    """One host. `init` is the process that keeps its namespaces; killing it ends every process of the host."""

    name: str
    address: str
    init: subprocess.Popen[bytes]
    folder: Path
    port: str  # the outer end of its link
    bridge: str

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--pid", "--mount", *command]

    @property
    def pid(self) -> int:
        """The first process inside the namespaces."""
        return int(Path("/proc", str(self.init.pid), "task", str(self.init.pid), "children").read_text().split()[0])

    def link(self, state: str) -> None:
        """`up` or `down`."""
        run("ip", "link", "set", self.port, state)

    @contextmanager
    def disturbed(self, delay: float, loss: float) -> Iterator[None]:
        """Its packets take `delay` seconds more in each direction, and a share of `loss` is lost. (Where the kernel has no netem:
        a process carries the frames between two TAP devices, between the host's link and the bridge.)"""
        outer, inner, between = (f"{self.port}{end}" for end in "oib")
        run("ip", "link", "add", between, "type", "bridge")
        relay = None
        try:
            command = [sys.executable, str(Path(__file__).with_name("relay.py")), outer, inner, str(delay), str(loss)]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert relay.stdout is not None and relay.stdout.readline() == b"ready\n"
            for port, bridge in ((outer, self.bridge), (inner, between), (self.port, between)):
                run("ip", "link", "set", port, "master", bridge)
            for port in (outer, inner, between):
                run("ip", "link", "set", port, "up")
            yield
        finally:
            run("ip", "link", "set", self.port, "master", self.bridge)
            if relay is not None:
                relay.kill()  # its devices go with it
                relay.wait()
            run("ip", "link", "del", between)

    def sshds(self) -> list[int]:
        """Process ids (as seen from outside) of all sshd of the host."""
        return [pid for pid in self.processes() if "sshd" in command_of(pid)]

    def processes(self) -> list[int]:
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == space:
                    found.append(int(name))
            except OSError:
                continue
        return found

    def find(self, text: str) -> list[int]:
        """Processes of the host whose command line has `text`."""
        return [pid for pid in self.processes() if text in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@dataclass
class Lab:
    """Hosts `n1`, `n2`, ... and the configuration with which ssh reaches them."""

    folder: Path
    subnet: str = ""  # the first three bytes of its addresses; the machine itself is 254. With IPv6 all but the last two, and fe
    ipv6: bool = False
    hosts: list[LabHost] = field(default_factory=list)

    def address(self, number: int | str) -> str:
        return f"{self.subnet}{':' if self.ipv6 else '.'}{number}"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def hostfile(self, folder: Path, slots: int = 1, count: int | None = None, name: str = "hosts") -> str:
        path = folder / name
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts[:count]))
        return str(path)

    def start(
        self, launches: Launches, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, on: LabHost | None = None
    ) -> Job:
        """zerorun with ssh's configuration of the lab, on a host of it, else on the bridge."""
        options = ["--launcher-args", f"-F {self.ssh_config}"] if "--hostfile" in argv or argv[0] == "check" else []
        argv = (argv[0], *options, *argv[1:]) if argv[0] == "check" else (*options, *argv)
        return launches.start(*argv, env=env, cwd=cwd, within=on.enter() if on is not None else ())


@contextmanager
def lab(folder: Path, count: int, ipv6: bool = False) -> Iterator[Lab]:
    """Hosts on a bridge of their own, with addresses of one family; several labs may exist at a time."""
    made = Lab(folder, ipv6=ipv6)
    bridge = ""
    try:
        bridge, made.subnet = make_bridge(ipv6)
        keys(folder)
        names = "".join(f"{made.address(i)} n{i}\n" for i in range(1, count + 1))
        own = made.address("fe" if ipv6 else 254)
        (folder / "etc_hosts").write_text(f"127.0.0.1 localhost\n{own} bridge {os.uname().nodename}\n{names}")
        (folder / "etc_resolv.conf").write_text("")
        for i in range(1, count + 1):
            made.hosts.append(make_host(folder, f"n{i}", made.address(i), bridge))
        write_ssh_config(made)
        yield made
    finally:
        for host in made.hosts:
            for pid in host.processes() if host.init.poll() is None else ():
                kill(pid)
            host.init.kill()
            host.init.wait()
            subprocess.run(["ip", "link", "del", host.port], capture_output=True)
        if bridge:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def make_bridge(ipv6: bool) -> tuple[str, str]:
    """Its name, and a subnet that nobody here uses: whoever gets the name gets the subnet."""
    for i in range(1, 200):
        made = subprocess.run(["ip", "link", "add", f"zr{i}", "type", "bridge"], capture_output=True, text=True)
        if made.returncode == 0:
            subnet, own = (f"fd00:211:{i}:", f"fd00:211:{i}::fe/64") if ipv6 else (f"10.211.{i}", f"10.211.{i}.254/24")
            run("ip", "addr", "add", own, "dev", f"zr{i}", *NO_DETECTION * ipv6)
            run("ip", "link", "set", f"zr{i}", "up")
            return f"zr{i}", subnet
        if "File exists" not in made.stderr:
            raise OSError(made.stderr)
    raise OSError("all bridges are taken")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    os.chmod(folder / "authorized_keys", 0o600)
    (folder / "sshd_config").write_text(
        textwrap.dedent(f"""\
        HostKey {folder}/host_key
        AuthorizedKeysFile {folder}/authorized_keys
        StrictModes no
        PasswordAuthentication no
        UsePAM no
        PidFile none
        PermitRootLogin prohibit-password
        MaxStartups 100
    """)
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


def make_host(folder: Path, name: str, address: str, bridge: str) -> LabHost:
    # Names are looked up in a file of the lab's, and nowhere else. --kill-child ends all when unshare is killed.
    mounts = " && ".join(f"mount --bind {folder}/etc_{file} /etc/{file}" for file in ("hosts", "resolv.conf"))
    script = f"hostname {name} && {mounts} && exec sleep 1000"
    spaces = ["--net", "--uts", "--pid", "--mount", "--mount-proc"]
    init = subprocess.Popen(["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", script])
    host = LabHost(name, address, init, folder, f"{bridge}-{name}", bridge)
    if not wait_until(lambda: _has_child(init.pid), 10):
        raise TimeoutError("unshare started nothing")
    wait_until(lambda: "sleep" in command_of(host.pid), 10)
    run("ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth7", "netns", str(host.pid))
    run("ip", "link", "set", host.port, "master", bridge)
    run("ip", "link", "set", host.port, "up")
    add = f"ip addr add {address}/64 dev eth7 nodad" if ":" in address else f"ip addr add {address}/24 dev eth7"
    for command in (add, "ip link set eth7 up", "ip link set lo up"):
        run(*host.enter(*command.split()))
    serve(host)
    return host


def serve(host: LabHost) -> None:
    """Starts its sshd."""
    sshd = shutil.which("sshd") or "sshd"
    run(*host.enter(sshd, "-f", str(host.folder / "sshd_config"), "-E", str(host.folder / f"sshd-{host.name}.log")))


def _has_child(pid: int) -> bool:
    return bool(Path("/proc", str(pid), "task", str(pid), "children").read_text().split())


def write_ssh_config(made: Lab) -> None:
    key = (made.folder / "host_key.pub").read_text()
    known = "".join(f"{host.address} {key}" for host in made.hosts)
    (made.folder / "known_hosts").write_text(known)
    parts = [f"Host {host.name}\n  HostName {host.address}\n" for host in made.hosts]
    rest = f"Host *\n  IdentityFile {made.folder}/user_key\n  UserKnownHostsFile {made.folder}/known_hosts\n  IdentitiesOnly yes\n"
    made.ssh_config.write_text("".join(parts) + rest)


def wait_for_text(path: Path, text: str, bound: float) -> bool:
    def there() -> bool:
        try:
            return text in path.read_text()
        except OSError:
            return False

    return wait_until(there, bound)
