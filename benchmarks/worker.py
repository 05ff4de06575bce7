"""A process that is measured: it does what the parent asks for, and sleeps in a read in between.

Requests and replies are lines of JSON on standard input and output. The first request names a job, `module:Class`;
it is built with the request's settings. Every later one is a dict of arguments for the job's `turn`. The end of the
input ends the process, so none outlives its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, Protocol, TextIO

from benchmarks.errors import Unavailable


class Job(Protocol):
    def ready(self) -> dict[str, Any]:
        """Facts for the parent, sent once before the first turn."""
        ...

    def turn(self, **arguments: Any) -> dict[str, Any]: ...


def _reply_channel() -> TextIO:
    """The real standard output, for replies alone: what libraries print goes to standard error (the log)."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def _build(request: dict[str, Any]) -> Job:
    module, _, name = request["job"].partition(":")
    job: Job = getattr(importlib.import_module(module), name)(**request["arguments"])
    return job


def _serve(replies: TextIO) -> None:
    job: Job | None = None
    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if job is None:
                job = _build(request)
                answer = {"ok": job.ready()}
            else:
                answer = {"ok": job.turn(**request)}
        except Unavailable as reason:
            answer = {"unavailable": str(reason)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer, default=str) + "\n")
        replies.flush()
        if "ok" not in answer:
            return


def main() -> None:
    replies = _reply_channel()
    try:
        _serve(replies)
    finally:
        sys.stderr.flush()
        # threads and process groups of the measured libraries may wait for peers that are gone
        os._exit(0)


if __name__ == "__main__":
    main()
