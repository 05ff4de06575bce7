"""Jobs over hosts that have IPv6 addresses only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launcher.jobs import Launches
from tests.launcher.netlab import Lab, lab, missing
from tests.launcher.test_hosts_ssh import SUM, nothing_left
from tests.launcher.test_hosts_training import losses, trained

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(reason)
    with lab(tmp_path_factory.mktemp("hosts6"), 2, ipv6=True) as made:
        yield made


def addresses(hosts: Lab, launches: Launches) -> str:
    """A hostfile with bare addresses, one in brackets and in another spelling."""
    first, second = (host.address for host in hosts.hosts)
    (launches.folder / "hosts").write_text(f"{first} slots=1\nroot@[{second.upper().replace('::', ':0::')}]:22 slots=1\n")
    return "hosts"


def lines(hosts: Lab, first: str = "") -> list[str]:
    return [f"[rank{i}] n{i + 1} 3 {i} 0 2 1 {first or hosts.hosts[0].address} eth7" for i in range(2)]


def test_addresses_in_a_hostfile(launches: Launches, hosts: Lab) -> None:
    names = addresses(hosts, launches)
    job = hosts.start(
        launches, "--hostfile", names, "--include", f"{hosts.hosts[0].address}@[{hosts.hosts[1].address}]:0", launches.script(SUM)
    )
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == lines(hosts)
    assert nothing_left(hosts, job, 2)
    master = f"[{hosts.hosts[0].address}]"
    job = hosts.start(launches, "--hostfile", names, "--master-addr", master, launches.script(SUM))
    assert job.finish() == 0 and sorted(job.out.splitlines()) == lines(hosts), job.err


def test_training_over_names_of_such_hosts(launches: Launches, hosts: Lab) -> None:
    job, one = trained(launches, "one", "--nproc", "2", LAST="3")
    assert job.finish() == 0, job.err
    job, two = trained(launches, "two", "--hostfile", hosts.hostfile(launches.folder), hosts=hosts, LAST="3")
    assert job.finish() == 0, job.err
    assert losses(two) == losses(one)


def test_the_same_command_on_each(launches: Launches, hosts: Lab) -> None:
    argv = ["--no-ssh", "--nnodes", "2", "--master-addr", f"[{hosts.hosts[0].address}]", "--nproc", "1", launches.script(SUM)]
    jobs = [launches.start("--node-rank", str(i), *argv, within=hosts.hosts[i].enter()) for i in (0, 1)]
    assert [job.finish() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert [line for job in jobs for line in job.out.splitlines()] == lines(hosts)


def test_check(launches: Launches, hosts: Lab) -> None:
    job = hosts.start(launches, "check", "--hostfile", addresses(hosts, launches), "--master-port", "29455")
    assert job.finish() == 0, job.out + job.err
    assert job.out.splitlines()[-1] == "2 hosts, nothing wrong"


def test_an_address_that_others_cannot_reach_is_named(launches: Launches, hosts: Lab) -> None:
    argv = ("--connect-timeout", "8", "--master-addr", "fd00:211:ffff::9", "--hostfile", hosts.hostfile(launches.folder))
    job = hosts.start(launches, *argv, launches.script("pass"))
    assert job.finish(30) == 1
    assert "cannot reach the first host at [fd00:211:ffff::9]:" in job.err and "eth7" in job.err or "no route" in job.err, job.err
    assert nothing_left(hosts, job, 2)


@pytest.mark.parametrize("transport", ["mpi", "pdsh"])
def test_programs_that_cannot_list_addresses_say_so(launches: Launches, hosts: Lab, transport: str) -> None:
    job = hosts.start(launches, "--launcher", transport, "--hostfile", addresses(hosts, launches), launches.script(SUM))
    assert job.finish() != 0
    assert "IPv6 address" in job.err or "is not installed here" in job.err, job.err
