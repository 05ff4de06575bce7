"""Links that hosts open to the launcher, where it has no pipe to them: pdsh, MPI, Slurm, or the same command on each."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from zeroengine.addresses import endpoint
from zeroengine.errors import ZeroEngineError

TOKEN = "ZERORUN_TOKEN"


def read_token(file: str | None) -> str:
    """The job's secret: from a file that only its owner can read, or from the environment."""
    if file is None:
        return os.environ.get(TOKEN, "")
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ZeroEngineError(
            f"{socket.gethostname()} cannot read {file} ({error}): pdsh needs a home folder that all hosts share; "
            "use --launcher ssh, or set ZERORUN_SHARED to a folder that they share"
        ) from None


def listen(address: str, port: int) -> socket.socket:
    """Listens on all addresses of this host, or on one. Raises `ZeroEngineError` where the port cannot be had."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        where = endpoint(address or socket.gethostname(), port)
        raise ZeroEngineError(f"cannot listen on {where}: {error.strerror}; choose another port with --master-port") from None
    listener.setblocking(False)
    return listener


def dial(address: str, port: int, patience: float) -> int:
    """A connection to the launcher, as a file descriptor. It may start later than this host."""
    end = time.monotonic() + patience
    reason = ""
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((address, port), timeout=min(5.0, left))
        except socket.gaierror as error:
            reason = f"{address} is no known host ({error})"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            keep_alive(connection)
            connection.setblocking(True)
            return connection.detach()
        time.sleep(min(0.3, max(0.0, left)))
    raise ZeroEngineError(
        f"{socket.gethostname()} cannot reach the launcher at {endpoint(address, port)} within {patience:g} s: {reason}. "
        "Start node 0 there, open the port, or choose another with --master-addr and --master-port"
    )


def keep_alive(connection: socket.socket) -> None:
    """Small messages go at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
