"""Addresses and interfaces, as the kernel's routing table knows them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

from zeroengine.addresses import unbracketed
from zeroengine.errors import ZeroEngineError

_GETROUTE, _ERROR, _REQUEST = 26, 2, 1
_DST, _OIF, _PREFSRC = 1, 4, 7
_MESSAGE, _ROUTE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")


@dataclass(frozen=True)
class Route:
    """How this host reaches an address: through which interface, from which address of its own."""

    interface: str
    source: str | None
    loopback: bool


def resolve(host: str) -> str:
    """One address of a host, the same at each call: IPv4 before IPv6, then by value. Raises `ZeroEngineError`."""
    host = unbracketed(host)
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ZeroEngineError(f"host {host} has no address here ({error}); give an address, or --master-addr") from None
    addresses = sorted((ipaddress.ip_address(str(a).partition("%")[0]) for a in found), key=lambda a: (a.version, int(a)))
    return str(addresses[0])


def route(address: str) -> Route:
    """Asks the kernel (netlink). Raises OSError where there is no route."""
    ip = ipaddress.ip_address(address)
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(ip.packed), _DST) + ip.packed
    body = _ROUTE.pack(family, ip.max_prefixlen, 0, 0, 0, 0, 0, 0, 0) + attribute
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(2.0)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(body), _GETROUTE, _REQUEST, 1, 0) + body)
        answer = kernel.recv(65536)
    length, kind, *_ = _MESSAGE.unpack_from(answer)
    if kind == _ERROR:
        code = -struct.unpack_from("=i", answer, _MESSAGE.size)[0]
        raise OSError(code, os.strerror(code), address)
    at, interface, source = _MESSAGE.size + _ROUTE.size, "", None
    while at + _ATTRIBUTE.size <= length:
        size, name = _ATTRIBUTE.unpack_from(answer, at)
        value = answer[at + _ATTRIBUTE.size : at + size]
        if name == _OIF:
            interface = socket.if_indextoname(struct.unpack("=I", value)[0])
        elif name == _PREFSRC:
            source = str(ipaddress.ip_address(value))
        at += (size + 3) & ~3
    if not interface:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH), address)
    return Route(interface, source, interface == "lo")


def is_local(host: str) -> bool:
    """True if the name or address is this host's own."""
    try:
        address = resolve(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))  # works for addresses of this host only
        return True
    except (OSError, ZeroEngineError):
        return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_for_one_link(address: str) -> bool:
    """An IPv6 address (fe80::...) that needs the name of an interface beside it, which is another on each host."""
    ip = ipaddress.ip_address(address)
    return ip.version == 6 and ip.is_link_local


def address_of(interface: str) -> str:
    """The first address of an interface of this host, IPv4 before IPv6. Raises `ZeroEngineError`."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        pass
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:
        rows = []
    for address, _, _, scope, _, name in rows:
        if name == interface and scope == "00":
            return str(ipaddress.ip_address(bytes.fromhex(address)))
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ZeroEngineError(f"--interface {interface}: no such interface with an address on {socket.gethostname()}; there are {names}")


def why_unreachable(address: str, port: int, timeout: float) -> str | None:
    """None once a connection to `address:port` stands; else the reason, after at most `timeout` seconds."""
    try:
        socket.create_connection((address, port), timeout=timeout).close()
        return None
    except OSError as error:
        return error.strerror or str(error)
