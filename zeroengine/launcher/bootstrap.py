"""First code of every rank: ties its life to the launcher's, runs the user's program, records how it failed.

Started by path, by the interpreter of the rank, which need not have this package: standard library only, and nothing of
it is left in the way of the program. Command line: `bootstrap.py script|module|exec TARGET ARGS...`.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)  # this folder, before anything of the same name is imported from it

import builtins
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import time
import traceback
from types import CodeType, ModuleType, TracebackType

_PR_SET_PDEATHSIG = 1
# A program without the engine's own errors: torch's words for "the peer's end of the connection is gone".
_PEER_GONE = re.compile(r"(connection|socket) (was )?(closed|reset)|broken pipe|remote process exited", re.IGNORECASE)
_TIME_TO_EXPLAIN = 2.0  # seconds


def tell(event: dict[str, object]) -> None:
    """Sends one event to the agent. Without an agent that listens there is no one to tell."""
    event = {"rank": int(os.environ["RANK"]), "attempt": int(os.environ["ZERORUN_ATTEMPT"]), **event}
    line = json.dumps(event).encode() + b"\n"
    try:
        pipe = os.open(os.path.join(os.environ["ZERORUN_DIR"], "events"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(pipe, line)
    finally:
        os.close(pipe)


def record(kind: str, title: str, code: int, text: str = "", peer: bool = False) -> bool:
    """Writes how this rank failed to a file, then says so; False where the file cannot be written."""
    when, path = time.monotonic(), os.path.join(os.environ["ZERORUN_DIR"], f"error-{os.getpid()}.json")
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"kind": kind, "title": title, "code": code, "text": text, "peer": peer, "time": when}, file)
    except OSError:
        return False
    tell({"event": "error", "pid": os.getpid(), "file": path})
    return True


def die_with_agent() -> None:
    """Asks the kernel to kill this process when the agent is gone: even a SIGKILLed launcher leaves no rank."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: the agent and the launcher still watch each other
        return
    if os.getppid() != int(os.environ["ZERORUN_AGENT"]):  # it went before the kernel was asked
        os._exit(1)


def blames_a_peer(error: BaseException) -> bool:
    """True if `error`, or one that it came from, says that another rank is the cause."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        names = {(c.__module__, c.__name__) for c in type(at).__mro__}
        from_torch = type(at) is RuntimeError or any(module.startswith("torch") for module, _ in names)
        if ("zeroengine.errors", "RankError") in names or (from_torch and _PEER_GONE.search(str(at))):
            return True
        at = at.__cause__ or at.__context__
    return False


def load(mode: str, target: str) -> tuple[CodeType, ModuleType]:
    """The program's code and the `__main__` that it runs in, as the interpreter itself would set them up."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if mode == "module":
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(target + ".__main__")
        loader = spec.loader if spec is not None else None
        if spec is None or spec.origin is None or not isinstance(loader, importlib.abc.InspectLoader):
            raise ModuleNotFoundError(f"no module {target!r} that can be run (searched from {os.getcwd()})")
        code, path = loader.get_code(spec.name), spec.origin
        main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
        sys.argv[0] = path
    else:
        path = os.path.abspath(target)
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if code is None:
        raise ImportError(f"module {target!r} has no code to run")
    main.__file__ = path
    return code, main


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that lies in the program."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    return at or trace


def run(mode: str, target: str) -> int:
    """Runs the program to its end; returns its exit code, or lets SystemExit through."""
    try:
        if mode == "exec":
            os.execvp(target, sys.argv)
        code, main = load(mode, target)
        sys.modules["__zerorun__"] = sys.modules["__main__"]  # keeps this module's globals alive
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
        return 0
    except SystemExit as end:
        code_of_end = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code_of_end:
            record("exit", f"sys.exit({end.code!r})", code_of_end & 0xFF)
        raise
    except KeyboardInterrupt:
        record("interrupt", "KeyboardInterrupt", 128 + signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException as error:
        error.__traceback__ = skip_own_frames(error.__traceback__)
        title = traceback.format_exception_only(type(error), error)[-1].strip()
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        peer = blames_a_peer(error)
        kept = record("exception", title[:2000], 1, text, peer)
        # The launcher shows the traceback of the rank that failed first, once. A hook of the program's own is obeyed.
        if not kept or sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, error.__traceback__)
        if peer and kept:
            # The end of this process makes the agent end all others. The one to blame may still be on its way out, and
            # would not get to say why; when it is gone this one is ended.
            time.sleep(_TIME_TO_EXPLAIN)
        return 1


def count_attempts() -> None:
    """Each attempt has a torch agent of its own on every host, which counts restarts from zero; programs are told of all."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["ZERORUN_ATTEMPT"]
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = os.environ["ZERORUN_MAX_RESTARTS"]


if __name__ == "__main__":
    die_with_agent()
    count_attempts()
    faulthandler.enable()  # a crash in native code shows where in the Python code it happened
    tell({"event": "start", "pid": os.getpid()})
    _mode, sys.argv = sys.argv[1], sys.argv[2:]
    sys.exit(run(_mode, sys.argv[0]))
