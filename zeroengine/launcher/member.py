"""One host as the launcher sees it: its link, what it said of itself, whether it is still there."""

from __future__ import annotations

import os
import subprocess
import time
from enum import Enum

from zeroengine.launcher.hosts import Host
from zeroengine.launcher.link import Decoder, LinkError, Message, Output, Writer, pack

_TAIL = 4096  # bytes kept of what a transport said


class State(Enum):
    """`WAITING`: to be started, or started and silent so far. `GREETED`: it speaks. `READY`: the job can run there.
    `LOST`: it could not be started, or is gone without being told. `GONE`: it has ended because it was told to."""

    WAITING, GREETED, READY, LOST, GONE = range(5)


class Member:
    """A host and the node on it."""

    def __init__(self, index: int, host: Host, remote: bool) -> None:
        self.index, self.host, self.remote = index, host, remote
        self.state = State.WAITING
        self.why = ""  # it is lost
        self.since = self.heard = time.monotonic()
        self.name = host.name  # its own word for itself, once known
        self.address: str | None = None
        self.nproc = 0
        self.retrying = False  # it was lost, and is called back
        self.times = 0  # that it was started anew
        self.tail = b""
        self.inbound: int | None = None
        self.errors: int | None = None  # the standard error of what carries the link
        self.writer: Writer | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.decoder = Decoder()
        self._trip = float("inf")  # the shortest round trip so far
        self.offset = 0.0  # from the host's clock to this one

    def attach(self, inbound: int, writer: Writer, errors: int | None = None, process: subprocess.Popen[bytes] | None = None) -> None:
        """Gives it a link."""
        self.inbound, self.writer, self.errors, self.process = inbound, writer, errors, process
        os.set_blocking(inbound, False)
        if errors is not None:
            os.set_blocking(errors, False)
        self.heard = time.monotonic()

    @property
    def there(self) -> bool:
        return self.state in (State.WAITING, State.GREETED, State.READY)

    def send(self, message: Message) -> None:
        if self.writer is not None:
            self.writer.put(pack(message))

    def read(self) -> list[Message | Output] | None:
        """What came over the link; None at its end."""
        if self.inbound is None:
            return None
        try:
            data = os.read(self.inbound, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.heard = time.monotonic()
        if not data:
            return None
        try:
            return self.decoder.feed(data)
        except LinkError as error:
            self.why = f"what it sends cannot be understood: {error}"
            return None

    def read_errors(self) -> bytes:
        """What the carrier of the link wrote to its standard error; the last of it is kept."""
        if self.errors is None:
            return b""
        try:
            data = os.read(self.errors, 65536)
        except BlockingIOError:
            return b""
        if not data:
            os.close(self.errors)
            self.errors = None
        self.tail = (self.tail + data)[-_TAIL:]
        return data

    def set_clock(self, sent: float, here: float) -> None:
        """From the answer to a beat: the best estimate comes with the shortest trip."""
        now = time.monotonic()
        if now - sent <= self._trip:
            self._trip, self.offset = now - sent, (now + sent) / 2 - here

    def lose(self, why: str) -> None:
        """The host takes no further part."""
        self.state, self.why, self.since = State.LOST, self.why or why, time.monotonic()
        self.detach()

    def detach(self) -> None:
        """Closes the link, which the node on the other side takes as the end, and ends what carried it."""
        while self.errors is not None and self.read_errors():
            continue
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        fds = {self.inbound, self.errors, self.writer.fd if self.writer is not None else None} - {None}
        self.inbound = self.errors = self.writer = self.process = None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    def again(self) -> None:
        """A lost host is to be started anew."""
        self.state, self.why, self.tail, self.decoder = State.WAITING, "", b"", Decoder()
        self.times += 1
        self.since = self.heard = time.monotonic()
        self._trip = float("inf")

    def last_words(self) -> str:
        """What a host that never answered, or its transport, wrote: the end of it, in one line."""
        text = (self.decoder.noise + b"\n" + self.tail).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Warning: Permanently added")]
        return "; ".join(lines[-3:])
