"""The random generators of this rank, as values that a checkpoint keeps."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's (where it is installed) and torch's generators, that of this rank's device included."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    try:
        import numpy
    except ImportError:
        return states
    states["numpy"] = numpy.random.get_state(legacy=True)
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Continues from `random_states`; generators that do not exist here are left out."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])
    if "numpy" in states:
        try:
            import numpy
        except ImportError:
            return
        numpy.random.set_state(tuple(states["numpy"]))
