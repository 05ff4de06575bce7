"""Addresses at which the hosts of a job reach one another."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import network
from zeroengine.launcher.member import Member
from zeroengine.launcher.plan import Job


def address_of(member: Member) -> str:
    """Raises `ZeroEngineError` for a host whose name is not known here."""
    return member.address or network.resolve(member.host.name)


def meeting_address(job: Job, first: Member, others: Sequence[Member]) -> str:
    """The address of `first` at which all `others` reach it. Raises `ZeroEngineError` if there is none, or it is not known."""
    if job.master_addr is not None and first.index == 0:
        return job.master_addr
    if not others:
        return "127.0.0.1"
    address = first.address
    if not first.remote:
        if job.interface is not None:
            return network.address_of(job.interface)
        try:
            address = network.route(address_of(others[0])).source
        except OSError as error:
            raise ZeroEngineError(f"no route to {others[0].name}: {error.strerror}; give --master-addr") from None
    if address is not None and network.is_for_one_link(address):
        told = f"the address of {first.name} is {address}, which other hosts reach through interfaces of other names"
        raise ZeroEngineError(f"{told}; give one of the network between the hosts with --master-addr")
    if address is None or (network.is_loopback(address) and any(m.remote and not network.is_loopback(address_of(m)) for m in others)):
        raise ZeroEngineError(f"the address of {first.name} for the other hosts is not known; give it with --master-addr")
    return address


def peer(member: Member, members: Sequence[Member], address: str) -> str:
    """Of `members`, whose first is met at `address`: the address to which a host's way is that of its ranks' connections. That is
    the first host's, and for it the second's; empty if it is not known."""
    if member is not members[0]:
        return address
    try:
        return address_of(members[1]) if len(members) > 1 else ""
    except ZeroEngineError:
        return ""
