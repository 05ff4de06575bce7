"""What a node finds out about its host for `zerorun check`."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from zeroengine.launcher import network
from zeroengine.launcher.link import Message

PACKAGES = ("zeroengine", "torch", "numpy", "transformers", "accelerate", "triton")
_CHUNK = 1 << 20
_WAIT = 10.0  # seconds for the other end of a measurement


def answer(message: Message) -> Message:
    """The answer to one question, by its `ask`; where it cannot be answered, `error` says why."""
    questions = {"facts": _facts, "write": _write, "read": _read, "remove": _remove, "listen": _listen, "send": _send}
    try:
        return questions[message["ask"]](message)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _facts(message: Message) -> Message:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"host": socket.gethostname(), "python": platform.python_version(), "versions": versions, "clock": time.time(),
            "port": _port(message["port"])}  # fmt: skip


def _port(port: int) -> str | None:
    """Why nobody can listen on `port`, if so."""
    if not port:
        return None
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both).close()
    except OSError as error:
        return error.strerror
    return None


def _write(message: Message) -> Message:
    Path(message["path"]).write_text(message["text"])
    return {}


def _read(message: Message) -> Message:
    """A network file system may show a new file late; listing its folder refreshes what is known of it."""
    path, end = Path(message["path"]), time.monotonic() + 2.0
    while True:
        try:
            os.listdir(path.parent)
            return {"text": path.read_text()}
        except FileNotFoundError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _remove(message: Message) -> Message:
    Path(message["path"]).unlink(missing_ok=True)
    return {}


def _listen(message: Message) -> Message:
    """Counts in a thread what one sender sends, and tells the sender."""
    listener = socket.socket(socket.AF_INET6 if ":" in message["address"] else socket.AF_INET)
    listener.settimeout(_WAIT)
    listener.bind((message["address"], 0))
    listener.listen(1)
    threading.Thread(target=_count, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _count(listener: socket.socket) -> None:
    try:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(_WAIT)
            total = 0
            while data := connection.recv(_CHUNK):
                total += len(data)
            connection.sendall(str(total).encode())
    except OSError:  # the sender says that it failed
        return


def _send(message: Message) -> Message:
    """Sends for some time; the rate is that of the bytes that have arrived."""
    begin = time.monotonic()
    with socket.create_connection((message["address"], message["port"]), timeout=_WAIT / 2) as connection:
        trip = time.monotonic() - begin
        connection.settimeout(_WAIT)
        data, start, sent = bytes(_CHUNK), time.monotonic(), 0
        while time.monotonic() < start + message["seconds"] and sent < message["bytes"]:
            connection.sendall(data)
            sent += len(data)
        connection.shutdown(socket.SHUT_WR)
        arrived = int(connection.recv(64) or b"0")
        seconds = time.monotonic() - start
    if arrived != sent:
        raise OSError(f"{sent} bytes were sent and {arrived} arrived")
    result: dict[str, Any] = {"rate": arrived / seconds, "trip": trip}
    way = network.route(message["address"])
    return {**result, "interface": way.interface}
