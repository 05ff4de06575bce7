"""A stand-in for the package `deepspeed`, for programs that are written for it.

Importing this module installs it: `import deepspeed`, its submodules and the version that `importlib.metadata` reports are
zeroengine's from then on. Import it before anything that asks whether DeepSpeed is there (transformers, accelerate, trl), or
start the program with `zerorun --as-deepspeed`. Raises `StandInError` where the real package, or something that decided
without it, was imported before.
"""

from zeroengine.integrations.standin.finder import StandInError, install

__all__ = ["StandInError", "install"]

install()
