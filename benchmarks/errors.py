"""Errors that the benchmarks tell apart."""

from __future__ import annotations


class Unavailable(Exception):
    """A system is not installed here. Said in one line; not a failure."""


class WorkerFailed(Exception):
    """A measured process raised, died, or did not answer in time."""
