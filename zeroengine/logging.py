"""One logger for the package: rank-aware, with a helper that says a thing once."""

from __future__ import annotations

import logging
import os

from zeroengine.errors import ConfigError

logger = logging.getLogger("zeroengine")
_said: set[str] = set()


class _RankFormatter(logging.Formatter):
    """Prefixes each record with the rank, read when the record is made: it is unknown at import."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = os.environ.get("RANK", "0")
        return super().format(record)


def _install() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_RankFormatter("[zeroengine rank %(rank)s] %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    level = os.environ.get("ZE_LOG_LEVEL", "").strip().upper() or "INFO"
    try:
        logger.setLevel(level)
    except ValueError:
        raise ConfigError(f"ZE_LOG_LEVEL={level}: it is one of DEBUG, INFO, WARNING, ERROR or CRITICAL") from None
    logger.propagate = False


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Logs on global rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, message)


def warn_rank0(message: str) -> None:
    """Warns on global rank 0 only."""
    log_rank0(message, logging.WARNING)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Logs `message` the first time it is given in this process, on global rank 0 only."""
    if message not in _said:
        _said.add(message)
        log_rank0(message, level)


if not logger.handlers:
    _install()
