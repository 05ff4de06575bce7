"""Exceptions of the engine. Every message names the rank (where ranks differ), the subject and the remedy."""

from __future__ import annotations


class ZeroEngineError(RuntimeError):
    """Base class of everything the engine raises on purpose."""


class ConfigError(ZeroEngineError, ValueError):
    """The configuration is wrong; the message names the full key path and the nearest valid one."""


class ModelError(ZeroEngineError, ValueError):
    """The model cannot be trained as given (no parameters, all frozen, unequal on the ranks, ...)."""


class ReleasedParameterError(ZeroEngineError):
    """The values of a sharded parameter were touched outside a gather."""


class MovedGradientError(ZeroEngineError):
    """The values of `param.grad` were used after the engine had moved them into a bucket."""


class RankError(ZeroEngineError):
    """Another rank died, stopped, failed, or left the common order of collectives."""


class DivergenceError(RankError):
    """Ranks called different collectives; the message names the ranks, the operations and the parameters."""


class NonFiniteError(ZeroEngineError, ArithmeticError):
    """Gradients were non-finite in a thousand steps in a row."""


class OutOfMemoryError(ZeroEngineError, MemoryError):
    """A rank could not get the memory that it asked for; the message says what it holds and which key of the configuration to
    change."""


class CheckpointError(ZeroEngineError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class OffloadError(ZeroEngineError):
    """What lives outside of the device cannot be stored or brought back; the message names the rank, the file and the remedy."""
