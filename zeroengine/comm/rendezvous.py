"""Meeting of the ranks: the store on MASTER_ADDR:MASTER_PORT, with clear errors within seconds."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zeroengine.addresses import endpoint, unbracketed
from zeroengine.errors import ConfigError, RankError
from zeroengine.wording import first_line

_PROCESS = uuid.uuid4().hex
_attended: set[str] = set()  # the meetings that this process has been to
_POLL_SECONDS = 0.05
_ENDING_SECONDS = 0.5
_HANDSHAKE_SECONDS = 12.0  # a busy host has needed more than 4 s to answer; a foreign program never does
_PORT_REMEDY = "Choose another MASTER_PORT (a launcher chooses a free one by itself), or end the process that holds it."


@dataclass(frozen=True)
class Place:
    """Rank and number of ranks of this process, and where they meet."""

    rank: int
    world_size: int
    host: str
    port: int
    agent_store: bool  # the launcher keeps the store, no rank does
    attempt: str

    @property
    def endpoint(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return endpoint(self.host, self.port)


def place_from_environment(env: Mapping[str, str], rank: int, world_size: int, mpi: bool) -> Place | None:
    """Reads torchrun's variables (with `mpi`: an MPI launcher's where those lack). None: a single process."""
    if mpi and "RANK" not in env:
        env = {**env, **_mpi_variables(env)}
    rank = rank if rank >= 0 else _integer(env, "RANK", 0)
    world_size = world_size if world_size > 0 else _integer(env, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} is outside 0..{world_size - 1} (WORLD_SIZE={world_size}); start the script with zerorun or torchrun, or set both"
        )
    if world_size == 1 and "MASTER_ADDR" not in env:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"rank {rank} of {world_size}: {' and '.join(missing)} not set; start the script with zerorun or torchrun, "
            "or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port = unbracketed(env["MASTER_ADDR"]), _integer(env, "MASTER_PORT", 0)
    return Place(rank, world_size, host, port, agent, attempt)


def meet(place: Place, timeout: timedelta) -> dist.Store:
    """The store of the job, kept by rank 0 or by the launcher. Raises `RankError` when the port is not ours.

    The ranks may leave and meet again, on the same port. Each meeting has a name, which rank 0 gives, and a part of the store of its
    own: what was written for an earlier one, as addresses, holds no more.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = _store(place, deadline)
        job = dist.PrefixStore(f"zeroengine/attempt_{place.attempt}", store)
        try:
            meeting = _meeting(job, place, deadline)
        except dist.DistError as error:
            lost = isinstance(error, dist.DistNetworkError)  # perhaps as rank 0 left the last meeting
            if not lost or place.rank == 0 or place.agent_store or time.monotonic() > deadline:
                raise RankError(
                    f"rank {place.rank}: the store on {place.endpoint} ended or hung while the ranks met ({first_line(error)}); "
                    "look at the output of rank 0 and of the launcher"
                ) from error
            meeting = None
        if meeting is not None:
            _attended.add(meeting)
            store.set_timeout(timeout)
            return dist.PrefixStore(f"meeting_{meeting}", job)
        del job, store  # rank 0 has yet to leave the last meeting, and its store ends with it: a lost connection would be loud
        time.sleep(_POLL_SECONDS)


def _store(place: Place, deadline: float) -> dist.Store:
    if place.rank == 0 and not place.agent_store:
        return _serve(place)
    _await_listener(place, deadline)
    try:
        return _connect(place)
    except RankError:
        if not _attended:
            raise
        time.sleep(_ENDING_SECONDS)  # it may have been the store of the last meeting, as that ended
        _await_listener(place, deadline)
        return _connect(place)


def _serve(place: Place) -> dist.Store:
    bound = timedelta(seconds=_HANDSHAKE_SECONDS)
    try:
        return dist.TCPStore(place.host, place.port, place.world_size, True, timeout=bound, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"rank 0 cannot listen on port {place.port} of {place.host} (host {socket.gethostname()}): the port is in "
            f"use or the address is not this host's ({first_line(error)}). {_PORT_REMEDY}"
        ) from error


def _await_listener(place: Place, deadline: float) -> None:
    """Rank 0 may start later than we do: anyone who listens ends the wait."""
    start, error = time.monotonic(), None
    while error is None or time.monotonic() < deadline:
        try:
            socket.create_connection((place.host, place.port), timeout=5.0).close()
            return
        except socket.gaierror as unknown:
            raise RankError(
                f"rank {place.rank}: MASTER_ADDR={place.host} is no known host ({unknown}); give a name or address that this host knows"
            ) from unknown
        except OSError as refused:
            error = refused
            time.sleep(0.1)
    raise RankError(
        f"rank {place.rank}: nothing listens on {place.endpoint} since {time.monotonic() - start:.0f} s "
        f"({error}); rank 0 did not start or a firewall is between: look at the output of rank 0"
    )


def _connect(place: Place) -> dist.Store:
    """In a thread of its own: a foreign server that accepts and says nothing would block for ever."""
    made: list[dist.Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            short = timedelta(seconds=_HANDSHAKE_SECONDS - 1.0)  # it ends by itself, with its own reason
            made.append(dist.TCPStore(place.host, place.port, place.world_size, False, timeout=short, wait_for_workers=False))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=connect, name="zeroengine rendezvous", daemon=True)
    thread.start()
    thread.join(_HANDSHAKE_SECONDS)
    if made:
        return made[0]
    reason = first_line(failed[0]) if failed else "it does not answer"
    raise RankError(
        f"rank {place.rank}: what listens on port {place.port} of {place.host} is not this job's store ({reason}); "
        f"the port is in use by another program, or rank 0 ended at once. {_PORT_REMEDY}"
    )


def _meeting(store: dist.Store, place: Place, deadline: float) -> str | None:
    """The name of the meeting that this process is to join. None: rank 0 is still in the last one, as far as this store knows. Two
    jobs that met on one port would mix their ranks without a word, hence the checks."""
    if place.rank == 0:
        if place.agent_store:  # else it holds the port
            _claim(store, place, "arrived/0")
        meeting = uuid.uuid4().hex
        store.set("meeting", f"{meeting} {place.world_size}")
        return meeting
    if not place.agent_store:  # whoever keeps it writes this at once
        deadline = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
    while not store.check(["meeting"]):
        if time.monotonic() > deadline:
            why = "rank 0 did not come" if place.agent_store else "it is not kept by rank 0 of this job. " + _PORT_REMEDY
            raise RankError(f"rank {place.rank}: no meeting of the ranks in the store on {place.endpoint}: {why}")
        time.sleep(_POLL_SECONDS)
    meeting, size = store.get("meeting").decode().split()
    if meeting in _attended:
        if time.monotonic() > deadline:
            raise RankError(f"rank {place.rank}: rank 0 did not come to the next meeting on {place.endpoint}; look at its output")
        return None
    if int(size) != place.world_size:
        raise RankError(
            f"rank {place.rank}: WORLD_SIZE is {place.world_size} here and {size} on rank 0 at "
            f"{place.endpoint}; the ranks were started differently, or another job meets on this port. " + _PORT_REMEDY
        )
    _claim(store, place, f"arrived/{meeting}/{place.rank}")
    return meeting


def _claim(store: dist.Store, place: Place, key: str) -> None:
    mine = f"{_PROCESS}-{os.getpid()}"  # the same one may join again after it has left
    if store.compare_set(key, "", mine).decode() != mine:
        raise RankError(
            f"rank {place.rank}: another process has already joined as rank {place.rank} on {place.endpoint}; "
            f"either RANK is set alike twice or another job meets on this port. {_PORT_REMEDY}"
        )


def _mpi_variables(env: Mapping[str, str]) -> dict[str, str]:
    for rank, size, local in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ):
        if rank in env and size in env:
            found = {"RANK": env[rank], "WORLD_SIZE": env[size]}
            if env.get(local) == env[size] and "MASTER_ADDR" not in env:
                found["MASTER_ADDR"] = "127.0.0.1"  # all ranks are on this host
            return found
    return {}


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not an integer") from None
