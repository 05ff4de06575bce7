"""The process between launcher and ranks: torch's elastic agent, which starts and restarts the ranks of one node.

It leads a session of its own, so that Ctrl-C reaches the launcher alone. It outlives no launcher: when the launcher's
end of the lifeline closes, for whatever reason, everything of the job is ended from here.

Command line: `python -m zeroengine.launcher.agent FD_OF_LIFELINE FD_OF_EVENTS`, with the plan in ZERORUN_DIR/plan.json.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from zeroengine.launcher import processes
from zeroengine.launcher.plan import Plan
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
    """Ends the job when the launcher is gone."""

    def __init__(self, fd: int, job: str, grace: float, watch: RankWatch) -> None:
        self._fd, self._job, self._grace, self._watch = fd, job, grace, watch
        threading.Thread(target=self._wait, name="lifeline", daemon=True).start()

    def _wait(self) -> None:
        os.read(self._fd, 1)  # nothing is ever written: it returns when the other end closes
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


def launch(plan: Plan, run_dir: str, job: str) -> dict[str, Any]:
    """Runs the ranks to their end; returns the event that says how it went."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO if plan.verbose else logging.CRITICAL)
    import torch
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class PipesToLauncher(LogsSpecs):
        """Output of local rank r goes to the pipes out.r and err.r, which the launcher reads."""

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

    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if 0 < gpus < plan.nproc:
        message = f"--nproc {plan.nproc}, but torch sees {gpus} GPU{'s' * (gpus > 1)} here: start fewer ranks, or hide "
        return {
            "event": "result",
            "status": "usage",
            "message": message + "the GPUs (CUDA_VISIBLE_DEVICES=) for CPU ranks",
        }

    # Without a port the agent's store takes a free one and keeps it: nobody can come in between. torch offers that with
    # one kind of rendezvous, and a port that was chosen with the other.
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    if plan.master_port:
        endpoint = f"127.0.0.1:{plan.master_port}"
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": 0}}
    settings: dict[str, Any] = {
        "shutdown_timeout": math.ceil(plan.grace)
    }  # torch >= 2.10; else the watch's bound holds
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.nproc,
        run_id=job,
        role="rank",
        local_addr="127.0.0.1",
        max_restarts=plan.max_restarts,
        monitor_interval=0.1,
        logs_specs=PipesToLauncher(),
        signals_to_handle=handled_signals(),
        **meeting,
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


def main(lifeline: int, events: int) -> int:
    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)  # until torch installs handlers of its own with the first rank
    channel = Channel(events)
    channel.send({"event": "ready"})
    run_dir, job = os.environ["ZERORUN_DIR"], os.environ[processes.MARK]
    plan = Plan.from_json(Path(run_dir, "plan.json").read_text())
    os.environ.update(plan.env, ZERORUN_AGENT=str(os.getpid()))
    watch = RankWatch(run_dir, job, plan.grace, channel.send)
    Lifeline(lifeline, job, plan.grace, watch)
    try:
        result = launch(plan, run_dir, job)
    except Exception as error:  # whatever torch raises here is told to the user in one line
        if plan.verbose:
            logging.getLogger("zeroengine").exception("the elastic agent failed")
        result = {"event": "result", "status": "error", "message": f"{type(error).__name__}: {error}"}
    channel.send(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
