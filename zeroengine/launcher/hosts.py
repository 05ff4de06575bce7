"""Which hosts take part, and which of their slots: hostfiles, and the filters of `--include` and `--exclude`.

A slot is a place in the list of a host's visible devices (0 is the first that is visible, whatever its physical number);
on a host without GPUs it is just a rank.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroengine.errors import ZeroEngineError
from zeroengine.wording import did_you_mean, listed

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-$]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.\-]+)?")
_RANGE = re.compile(r"\[([0-9,\-]+)\]")
_KEYS = ("slots", "port", "user")
_MOST = 65536  # names that one line may stand for


@dataclass(frozen=True)
class Host:
    """One host of a job. `slots` None: as many as it has GPUs, one where it has none."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: tuple[int, ...] | None = None
    chosen: bool = False  # slots were picked by number: the ranks see these devices only

    @property
    def target(self) -> str:
        """`user@name`, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Hosts in the order of the file. Lines are `[user@]host[:port] [slots=N] [port=N] [user=NAME]`; a host may be a range
    (`node[01-04,7]`) or an IPv6 address (in brackets where a port follows); `#` starts a comment.

    Raises `ZeroEngineError` with file, line and text of what cannot be read.
    """
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for host in _line(words):
                if host.name in lines:
                    raise ValueError(f"host {host.name} is in line {lines[host.name]} already; give its slots in one line")
                lines[host.name] = number
                hosts.append(host)
        except ValueError as error:
            raise ZeroEngineError(f"hostfile {path}:{number}: {line.strip()!r}: {error}") from None
    if not hosts:
        raise ZeroEngineError(f"hostfile {path} names no host; a line is HOST slots=N")
    return tuple(hosts)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """`parse_hostfile` of a file. One that is named but absent is an error, never a reason to use one node."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ZeroEngineError(f"--hostfile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ZeroEngineError(f"--hostfile {path} is no text (byte {error.start} is not UTF-8)") from None
    return parse_hostfile(text, path)


def _line(words: Sequence[str]) -> Iterator[Host]:
    settings: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            hint = did_you_mean(key, _KEYS, "after the host come slots=N, port=N, user=NAME")
            raise ValueError(f"{word!r} is no setting of a host; {hint}")
        if key in settings:
            raise ValueError(f"{key}= is given twice")
        settings[key] = value
    slots = _number("slots", settings["slots"], 0, _MOST) if "slots" in settings else None
    for host in parse_hosts(words[0]):
        port = _number("port", settings["port"], 1, 65535) if "port" in settings else host.port
        user = settings.get("user", host.user)
        if user is not None and not _USER.fullmatch(user):
            raise ValueError(f"{user!r} is no name of a user")
        if slots != 0:  # 0: the host is listed but not used
            yield Host(host.name, user, port, tuple(range(slots)) if slots else None)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`[user@]name[:port]` with ranges. Raises ValueError."""
    user, at, rest = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} is no name of a user")
    name, port = _split_port(rest)
    number = _number("port", port, 1, 65535) if port is not None else None
    return tuple(Host(name, user or None, number) for name in expand(name))


def _split_port(text: str) -> tuple[str, str | None]:
    if text.startswith("[") and ":" in text.partition("]")[0]:  # an IPv6 address in brackets
        address, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is no address; an IPv6 address with a port is [ADDRESS]:PORT")
        return address, rest[1:] if rest else None
    if text.count(":") > 1:  # an IPv6 address as it is
        return text, None
    name, colon, port = text.partition(":")
    return name, port if colon else None


def expand(name: str) -> tuple[str, ...]:
    """`node[01-03,7]` is node01, node02, node03, node7; several ranges in a name multiply. Raises ValueError."""
    if ":" in name:
        if not _IPV6.fullmatch(name):
            raise ValueError(f"{name!r} is no IPv6 address")
        try:
            return (str(ipaddress.IPv6Address(name)),)  # one of the several ways to write it, so that hosts can be told apart
        except ValueError:
            raise ValueError(f"{name!r} is no IPv6 address") from None
    names = [""]
    end = 0
    for found in _RANGE.finditer(name):
        choices = list(_numbers(found.group(1)))
        names = [n + name[end : found.start()] + c for n in names for c in choices]
        if len(names) > _MOST:
            raise ValueError(f"{name!r} stands for more than {_MOST} hosts")
        end = found.end()
    names = [n + name[end:] for n in names]
    for n in names:
        if not _NAME.fullmatch(n):
            raise ValueError(f"{name!r} is no name of a host")
    return tuple(names)


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"[{text}] is no list of numbers and ranges, as in [01-04,7]")
        if dash and int(last) - int(first) >= _MOST:
            raise ValueError(f"[{text}] stands for more than {_MOST} hosts")
        width = len(first) if first.startswith("0") else 0
        yield from (f"{n:0{width}d}" for n in range(int(first), int(last if dash else first) + 1))


def _number(what: str, text: str, low: int, high: int) -> int:
    if not text.isdigit() or not low <= int(text) <= high:
        raise ValueError(f"{what}={text}: a number from {low} to {high}")
    return int(text)


def filtered(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """What `--include` leaves, or what `--exclude` does not take: `host[:slot,slot…][@host…]`, hosts and slots also as
    ranges. Hosts keep the order of `hosts`. Raises `ZeroEngineError` for hosts and slots that do not exist."""
    if include is not None and exclude is not None:
        raise ZeroEngineError("--include and --exclude exclude each other: give the one that says it all")
    if include is not None:
        wanted = _filter("--include", include, hosts)
        return tuple(_only(host, wanted[host.name]) for host in hosts if host.name in wanted)
    if exclude is None:
        return tuple(hosts)
    unwanted = _filter("--exclude", exclude, hosts)
    left = [_without(host, unwanted[host.name]) if host.name in unwanted else host for host in hosts]
    kept = tuple(host for host in left if host is not None)
    if not kept:
        raise ZeroEngineError(f"--exclude {exclude} leaves no slot of any host")
    return kept


def _filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    by_name = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...] | None] = {}
    try:
        for part in filter(None, text.split("@")):
            names, slots = _split_port(part)
            chosen = tuple(sorted({int(n) for n in _numbers(slots)})) if slots is not None else None
            for name in expand(names):
                if name not in by_name:
                    raise ValueError(
                        f"no host {name} in the list of hosts; {did_you_mean(name, by_name, f'known are {listed(list(by_name))}')}"
                    )
                if name in found:
                    raise ValueError(f"host {name} is given twice")
                have = by_name[name].slots
                if missing := sorted(set(chosen or ()) - set(have if have is not None else chosen or ())):
                    shown = ", ".join(map(str, missing))
                    raise ValueError(f"host {name} has no slot {shown}; its slots are {', '.join(map(str, have or ()))}")
                found[name] = chosen
    except ValueError as error:
        raise ZeroEngineError(f"{option} {text}: {error}") from None
    if not found:
        raise ZeroEngineError(f"{option} {text!r}: HOST[:SLOT,SLOT...][@HOST...]")
    return found


def _only(host: Host, slots: tuple[int, ...] | None) -> Host:
    return host if slots is None else dataclasses.replace(host, slots=slots, chosen=True)


def _without(host: Host, slots: tuple[int, ...] | None) -> Host | None:
    if slots is None:
        return None
    if host.slots is None:
        raise ZeroEngineError(f"--exclude: how many slots {host.name} has is not known; give slots=N in the hostfile")
    left = tuple(s for s in host.slots if s not in slots)
    return dataclasses.replace(host, slots=left, chosen=True) if left else None


def limited(hosts: Sequence[Host], nodes: int | None, nproc: int | None) -> tuple[Host, ...]:
    """The first `nodes` hosts with the first `nproc` slots of each. Raises `ZeroEngineError` where there are fewer."""
    if nodes is not None and nodes > len(hosts):
        raise ZeroEngineError(f"--nnodes {nodes}, but there are {len(hosts)} hosts: {', '.join(h.name for h in hosts)}")
    kept: list[Host] = []
    for host in hosts[:nodes]:
        if nproc is not None and host.slots is not None and nproc > len(host.slots):
            raise ZeroEngineError(f"--nproc {nproc}, but {host.name} has {len(host.slots)} slots")
        slots = host.slots if nproc is None else (host.slots or tuple(range(nproc)))[:nproc]
        kept.append(dataclasses.replace(host, slots=slots))
    return tuple(kept)


def visible_devices(visible: str | None, slots: Sequence[int]) -> str:
    """The value of a variable like CUDA_VISIBLE_DEVICES that shows only `slots` of what `visible` shows. Raises
    ValueError that names a slot which is not there."""
    if visible is None:
        return ",".join(map(str, slots))
    listed = [name.strip() for name in visible.split(",") if name.strip()]
    for slot in slots:
        if slot >= len(listed):
            raise ValueError(f"slot {slot} is not there: the visible devices are {visible!r}, slots 0 to {len(listed) - 1}")
    return ",".join(listed[slot] for slot in slots)
