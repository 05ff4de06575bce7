"""What the launcher starts on each host: runs the host's part of each attempt and tells the launcher all of it.

It outlives no launcher: when the link closes, or nothing has come over it for `node_timeout` seconds (a cut cable closes
no connection), everything of the job on this host is ended. It imports no torch, so it answers at any time.

Command line: `link FD_IN FD_OUT`, `stdio`, or `dial ADDRESS PORT NAME [FILE_OF_TOKEN]`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from zeroengine import __version__
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import processes
from zeroengine.launcher.dialling import dial, read_token
from zeroengine.launcher.link import GREETING, Decoder, LinkError, Message, Output, Writer, pack, pack_output
from zeroengine.launcher.localrun import SLACK, LocalRun, RankPipes, run_folder
from zeroengine.launcher.plan import Part, Plan
from zeroengine.launcher.preparing import Prepared, prepare
from zeroengine.launcher.signals import ENDS

_BACKLOG = 1 << 22  # bytes that may wait for the link before ranks have to wait with their output


def proof(token: str, nonce: str, side: str) -> str:
    """Shows knowledge of the token without saying it."""
    return hmac.new(token.encode(), f"{side} {nonce}".encode(), hashlib.sha256).hexdigest()


class Display(Protocol):
    """Where the ranks' output goes on a host whose console is its own."""

    def begin(self, base: int, world: int) -> None: ...
    def feed(self, output: Output) -> None: ...
    def flush_held(self) -> None: ...
    def say(self, text: str) -> None: ...
    def finish(self) -> None: ...


class Node:
    """One host's end of the link. With `display` the ranks' output is shown here, and `own` is what runs here; else all goes
    to the launcher, and comes from it."""

    def __init__(
        self, inbound: int, outbound: int, name: str = "", token: str = "", own: Plan | None = None, display: Display | None = None
    ) -> None:
        self._in, self._out = inbound, Writer(outbound)
        self._name, self._token, self._own, self._display = name, token, own, display
        self._nonce = secrets.token_hex(16)
        self._decoder = Decoder()
        self._decoder.greeted = True  # the launcher writes nothing but frames
        self._heard = time.monotonic()
        self._timeout = 0.0  # 0: only the end of the link counts
        self._trusted = not token
        self._prepared: Prepared | None = None
        self._pipes: RankPipes | None = None
        self._run: LocalRun | None = None
        self._former: list[str] = []  # marks of what an earlier node of this host may still be ending
        self._patience = 0.0  # until when it may
        self._leaving = self._closed = False
        self._asked: list[int] = []  # signals to this process, of Slurm or MPI
        self._code = 1
        self._folder = run_folder()
        self._mark = f"node-{os.getpid()}"
        self._do: Mapping[str, Callable[[Message], None]] = {
            "challenge": self._challenge, "prepare": self._prepare, "start": self._start, "meet": self._meet, "stop": self._stop,
            "end": self._end, "kill": self._kill, "signal": self._signal, "beat": self._beat, "say": self._say, "probe": self._probe,
        }  # fmt: skip

    def run(self) -> int:
        """Until the launcher says so, or is gone. The exit code that the launcher gave."""
        self._out.put(GREETING)
        if not self._token:
            self._hello(None)
        wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # Those of a terminal are the launcher's, unless the user started this process there.
        asking = ENDS if self._display is not None else (signal.SIGTERM,)
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored (nohup) stays so, for the ranks too
                signal.signal(number, lambda number, frame: self._asked.append(number) if number in asking else None)
        with self._folder:
            while not (self._leaving and self._run is None):
                self._turn(wakeup)
            self._last_words()
        return self._code

    def _turn(self, wakeup: int) -> None:
        reading = {wakeup, self._in, *([self._run.events] if self._run is not None and not self._run.ending else [])}
        if self._pipes is not None and self._out.waiting < _BACKLOG:
            reading.update(self._pipes.fds)
        if self._closed:
            reading.discard(self._in)
        with selectors.DefaultSelector() as selector:
            for fd in reading:
                selector.register(fd, selectors.EVENT_READ)
            if self._out.waiting and not self._out.broken:
                selector.register(self._out.fd, selectors.EVENT_WRITE)
            ready = [key.fd for key, _ in selector.select(0.02 if self._run is not None and self._run.ending else 0.2)]
        for fd in ready:
            if fd == wakeup:
                os.read(fd, 4096)
            elif fd == self._in:
                self._read_link()
            elif self._run is not None and fd == self._run.events:
                self._read_run()
            elif fd != self._out.fd:
                self._forward(fd)
        if self._former and not self._leaving:
            self._say_ready()
        if self._asked and not self._leaving:  # the launcher then ends the other hosts too
            self._tell("asked", number=self._asked[0])
            self._code = 128 + self._asked[0]
            self._leave(self._asked[0])
        self._out.flush()
        if self._display is not None:
            self._display.flush_held()
        if self._run is not None and self._run.step():
            self._finish_run()
        if not self._leaving and self._timeout and time.monotonic() > self._heard + self._timeout:
            self._leave(signal.SIGTERM)

    def _read_link(self) -> None:
        try:
            data = os.read(self._in, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._closed = True
            self._leave(signal.SIGTERM)
            return
        self._heard = time.monotonic()
        try:
            frames = self._decoder.feed(data)
        except LinkError:
            self._closed = True
            self._leave(signal.SIGTERM)
            return
        for frame in frames:
            if isinstance(frame, dict):
                self._do[frame["do"]](frame)

    def _tell(self, event: str, **values: object) -> None:
        self._out.put(pack({"event": event, **values}))

    def _hello(self, answer: str | None) -> None:
        address = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        self._tell(
            "hello", name=self._name, host=socket.gethostname(), pid=os.getpid(), version=__version__, nonce=self._nonce,
            proof=answer, address=address[0] if address else None,
        )  # fmt: skip

    def _challenge(self, message: Message) -> None:
        self._hello(proof(self._token, message["nonce"], "node"))

    def _prepare(self, message: Message) -> None:
        if self._token and not hmac.compare_digest(message.get("proof", ""), proof(self._token, self._nonce, "launcher")):
            self._leave(signal.SIGTERM)  # whoever answers there does not know the job's secret
            return
        self._trusted = True
        self._mark, self._timeout = message["mark"], message["timeout"]
        try:
            self._prepared = prepare(message, self._own)
        except (ZeroEngineError, ValueError) as error:
            self._tell("refused", message=str(error))
            return
        self._pipes = RankPipes(self._folder.name, self._prepared.plan.nproc)
        self._heard = time.monotonic()
        self._former, self._patience = message["former"], self._heard + self._prepared.plan.grace + SLACK
        self._say_ready()

    def _say_ready(self) -> None:
        """Once nothing is left of the time before this host was lost: two attempts must not run here at one time."""
        if self._prepared is None:
            return
        left = [pid for mark in self._former for pid in processes.members(mark, ())]
        if left and time.monotonic() > self._patience:
            processes.send(left, signal.SIGKILL)
        if not left:
            self._former = []
            self._tell("ready", nproc=self._prepared.plan.nproc, said=self._prepared.said)

    def _start(self, message: Message) -> None:
        if self._prepared is None or self._run is not None or self._leaving:
            return
        if self._display is not None:
            self._display.begin(message["base"], message["world"])
        part = Part(**message["part"])
        self._run = LocalRun(self._prepared.plan, part, self._folder.name, self._mark, self._prepared.env)

    def _meet(self, message: Message) -> None:
        if self._run is not None:
            self._run.meet(message["address"], message["port"])

    def _stop(self, message: Message) -> None:
        if self._run is not None:
            self._run.stop()
        else:
            self._tell("stopped", attempt=message["attempt"])

    def _end(self, message: Message) -> None:
        self._code = message["code"]
        self._leave(message["number"])

    def _kill(self, message: Message) -> None:
        if self._run is not None:
            self._run.kill()
        self._leaving = True

    def _signal(self, message: Message) -> None:
        if self._run is not None:
            self._run.signal_ranks(message["number"])

    def _beat(self, message: Message) -> None:
        self._tell("beat", at=message["at"], here=time.monotonic())

    def _say(self, message: Message) -> None:
        if self._display is not None:
            self._display.say(message["text"])

    def _probe(self, message: Message) -> None:
        from zeroengine.launcher.probe import answer

        if self._trusted:
            self._tell("probed", **answer(message))

    def _leave(self, number: int) -> None:
        self._leaving = True
        if self._run is not None:
            self._run.stop(number)

    def _read_run(self) -> None:
        if self._run is None:
            return
        for event in self._run.read():
            self._out.put(pack({"attempt": self._run.attempt, **event}))

    def _forward(self, fd: int) -> bool:
        output = self._pipes.read(fd) if self._pipes is not None else None
        if output is None:
            return False
        if self._display is not None:
            self._display.feed(output)
        else:
            self._out.put(pack_output(output))
        return True

    def _finish_run(self) -> None:
        """Everything that the ranks wrote goes before the word that they are gone."""
        if self._run is None:
            return
        for fd in self._pipes.fds if self._pipes is not None else ():
            while self._forward(fd):
                continue
        attempt, status = self._run.attempt, self._run.close()
        self._run = None
        self._tell("stopped", attempt=attempt, agent=status)

    def _last_words(self) -> None:
        """Gives the launcher a moment to take what is left, and ends what this node has started in other ways."""
        self._tell("gone")
        end = time.monotonic() + 2.0
        while self._out.waiting and not self._out.broken and time.monotonic() < end:
            time.sleep(0.01)
            self._out.flush()
        if self._display is not None:
            self._display.finish()
        if self._pipes is not None:
            self._pipes.close()
        processes.end_all(self._mark, (), 0.0)


def own_ends() -> tuple[int, int]:
    """Takes standard input and output for the link; what others read and write there leads nowhere, or to the error."""
    inbound, outbound = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return inbound, outbound


def main(argv: Sequence[str]) -> int:
    """The process on a host; its exit code matters only to who started it."""
    kind, *rest = argv
    if kind == "link":
        return Node(int(rest[0]), int(rest[1])).run()
    if kind == "stdio":
        return Node(*own_ends()).run()
    address, port, name, *file = rest
    try:
        token = read_token(file[0] if file else None)
        connection = dial(address, int(port), 30.0)
    except ZeroEngineError as error:
        sys.stderr.write(f"zerorun: error: {error}\n")
        return 1
    return Node(connection, os.dup(connection), name or os.environ.get("SLURMD_NODENAME", ""), token).run()
