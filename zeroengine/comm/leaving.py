"""The end of a process: no thread may come back from native code into an interpreter that is no more, where it would end
the process with SIGABRT whatever its exit code."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress

from zeroengine.comm.whereabouts import other_threads_run

_NATIVE_SECONDS = 1.0
_LOOK_SECONDS = 0.002


def settle_native_threads() -> None:
    """Waits, for a second at most, until no other thread of this process runs.

    A worker of Gloo tells of the end of its operation and drops the tensors after it, for which it takes the GIL. Nothing
    shows what it still holds, but until it has dropped it the thread is runnable. One that waits for the GIL is not, and
    has it while this one sleeps: hence two looks.
    """
    deadline, quiet = time.monotonic() + _NATIVE_SECONDS, 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        quiet = 0 if other_threads_run() else quiet + 1


def leave_at_once(code: int) -> None:
    """Ends the process after an uncaught error while a thread is in a collective that will not end, or just left one whose
    group is broken.

    The thread cannot be interrupted: Gloo has no abort. Its peer may close the connection while the interpreter is being
    taken down. So what an ordinary exit would run is run here, and the rest is left out.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


atexit.register(settle_native_threads)  # at import: what is registered later, and may use a group, runs before it
