"""The process between a host's node and its ranks: torch's elastic agent, which runs the ranks of one attempt.

It leads a session of its own, so that Ctrl-C reaches the launcher alone. It outlives no node: when the node's end of the
lifeline closes, for whatever reason, everything of the job on this host is ended from here.

Command line: `FD_OF_LIFELINE FD_OF_EVENTS`, with plan and part in ZERORUN_DIR/plan.json. Over the lifeline comes one line,
where the first host's store is; the first host says so itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from zeroengine.addresses import endpoint
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import network, processes
from zeroengine.launcher.plan import Part, Plan
from zeroengine.launcher.watch import RankWatch

BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))


class Channel:
    """Events to the launcher, one JSON object a line. Threads may share it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def send(self, event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:  # the launcher is gone; the lifeline deals with that
                return


class Lifeline:
    """Brings the address of the store, and ends the job's part on this host when the node is gone."""

    def __init__(self, fd: int, job: str, grace: float, watch: RankWatch) -> None:
        self._fd, self._job, self._grace, self._watch = fd, job, grace, watch
        self.store: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="lifeline", daemon=True).start()

    def _wait(self) -> None:
        rest = b""
        while data := os.read(self._fd, 4096):  # empty when the other end has closed
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.store.put((message["address"], message["port"]))
        try:
            processes.end_all(self._job, self._watch.sessions, self._grace)
        finally:
            os._exit(1)


def rank_command(plan: Plan) -> tuple[str, list[str]]:
    """Interpreter and arguments of a rank. torch's agent expands `${...}` in arguments; a doubled $ stays a $."""
    interpreter = sys.executable if plan.mode == "exec" else plan.python
    arguments = ["-u", BOOTSTRAP, plan.mode, plan.target, *plan.args]
    return interpreter, [argument.replace("$", "$$") for argument in arguments]


def handled_signals() -> str:
    """Signals that end the ranks, without those which whoever started us wants ignored (nohup)."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    return ",".join(n for n in names if signal.getsignal(getattr(signal, n)) is not signal.SIG_IGN)


def meeting_place(part: Part, channel: Channel, lifeline: Lifeline) -> tuple[str, int, object]:
    """Address and port of the attempt's store, which the first host keeps alive with the third value. Raises
    ConnectionError that names both ends where it cannot be reached."""
    from zeroengine.launcher import meeting

    meeting.register()
    if part.index == 0:
        store = meeting.serve(part.port)
        channel.send({"event": "port", "port": store.port})
        return part.address, store.port, store
    address, port = lifeline.store.get()
    if reason := network.why_unreachable(address, port, part.patience):
        raise ConnectionError(unreachable(address, port, part, reason))
    return address, port, None


def unreachable(address: str, port: int, part: Part, reason: str) -> str:
    """Why the ranks cannot meet, with both ends and the way between them."""
    try:
        way = network.route(network.resolve(address))
        path = f"over {way.interface} ({way.source})"
    except (OSError, ZeroEngineError) as error:
        path = f"for which there is no route ({error})"
    return (
        f"{socket.gethostname()} cannot reach the first host at {endpoint(address, port)} {path} within "
        f"{part.patience:g} s: {reason}. Open the ports between the hosts, or choose another address or network with "
        "--master-addr or --interface (zerorun check tries every pair of hosts)"
    )


def output_pipes(run_dir: str) -> Any:
    """torch's plan for the output of local rank r: the pipes out.r and err.r, which the node reads."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Pipes(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return run_dir

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for rank, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = os.path.join(run_dir, f"torchelastic-{rank}.json")
            return LogsDest(
                stdouts={rank: os.path.join(run_dir, f"out.{rank}") for rank in envs},
                stderrs={rank: os.path.join(run_dir, f"err.{rank}") for rank in envs},
                error_files={rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()},
            )

    return Pipes()


def too_many_ranks(plan: Plan) -> str | None:
    """Why this host's devices do not suffice for its ranks, if so."""
    import torch

    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not 0 < gpus < plan.nproc:
        return None
    seen = f"torch sees {gpus} GPU{'s' * (gpus > 1)} here: start fewer ranks, or hide the GPUs (CUDA_VISIBLE_DEVICES=) for CPU ranks"
    return f"--nproc {plan.nproc}, but {seen}"


def launch(plan: Plan, part: Part, run_dir: str, job: str, address: str, port: int) -> dict[str, Any]:
    """Runs the ranks to their end; returns the event that says how it went."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not plan.verbose:
        for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # torch >= 2.10 has a bound of its own; else the watch's holds.
    settings: dict[str, Any] = {"shutdown_timeout": math.ceil(plan.grace)}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=part.nodes,
        max_nodes=part.nodes,
        nproc_per_node=plan.nproc,
        run_id=f"{job.rpartition('.')[0]}.{part.attempt}",
        role="rank",
        local_addr=part.address,
        max_restarts=0,  # the launcher restarts all hosts together
        monitor_interval=0.1,
        logs_specs=output_pipes(run_dir),
        signals_to_handle=handled_signals(),
        rdzv_backend="zerorun",
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={"index": part.index},
        **{name: value for name, value in settings.items() if name in known},
    )
    command, arguments = rank_command(plan)
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as failed:
        # Known from the watch already, save for a rank that died before its first line of code.
        ends = [{"rank": rank, "pid": f.pid, "status": f.exitcode} for rank, f in failed.failures.items()]
        return {"event": "result", "status": "failed", "ends": ends}
    except SignalException as ended:
        return {"event": "result", "status": "signal", "message": ended.sigval.name}
    return {"event": "result", "status": "ok"}


def interfaces(part: Part) -> dict[str, str]:
    """Tells the ranks' libraries which interface leads to the other hosts, where the user did not tell them."""
    name = part.interface
    if not name and part.nodes > 1 and part.peer:
        try:
            address = network.resolve(part.peer)
            way = network.route(address)
        except (OSError, ZeroEngineError):  # the store will not be reached either, and that error says more
            return {}
        # An address of this very host is reached without an interface that others could reach.
        name = way.interface if not way.loopback or network.is_loopback(address) else ""
    libraries = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return {library: name for library in libraries if name and library not in os.environ}


@contextmanager
def quiet_torch(verbose: bool) -> Iterator[None]:
    """Around the first import of torch: its native code reads once how much to say. Ranks read it anew."""
    name = "TORCH_CPP_LOG_LEVEL"
    if verbose or name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        import torch.distributed  # noqa: F401

        yield
    finally:
        del os.environ[name]


def main(argv: Sequence[str]) -> int:
    lifeline, events = map(int, argv)

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)  # until torch installs handlers of its own with the first rank
    channel = Channel(events)
    channel.send({"event": "ready"})
    run_dir, job = os.environ["ZERORUN_DIR"], os.environ[processes.MARK]
    settings = json.loads(Path(run_dir, "plan.json").read_text())
    plan, part = Plan.from_dict(settings["plan"]), Part(**settings["part"])
    os.environ.update(plan.env)
    os.environ.update(interfaces(part))
    os.environ.update(ZERORUN_AGENT=str(os.getpid()), ZERORUN_ATTEMPT=str(part.attempt), ZERORUN_MAX_RESTARTS=str(plan.max_restarts))
    if plan.verbose:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO)
    watch = RankWatch(run_dir, job, plan.grace, channel.send)
    line = Lifeline(lifeline, job, plan.grace, watch)
    store: object = None
    try:
        with quiet_torch(plan.verbose):
            result = {"event": "result", "status": "usage", "message": too_many_ranks(plan)}
        if result["message"] is None:
            address, port, store = meeting_place(part, channel, line)
            result = launch(plan, part, run_dir, job, address, port)
    except ConnectionError as error:
        result = {"event": "result", "status": "unreachable", "message": str(error)}
    except Exception as error:  # whatever torch raises here is told to the user in one line
        if plan.verbose:
            logging.getLogger("zeroengine").exception("the elastic agent failed")
        result = {"event": "result", "status": "error", "message": f"{type(error).__name__}: {error}"}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # no rank is left to which a signal could be passed on
    channel.send(result)
    if store is not None and part.nodes > 1 and result["status"] == "ok":
        signal.pause()  # ranks of other hosts may still run, and their agents use the store that lives here
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
