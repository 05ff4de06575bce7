"""Frozen weights that bitsandbytes has packed into fewer bits: values of another type than that of the tensor they lie in."""

from __future__ import annotations

from torch import Tensor, nn

from zeroengine.errors import ModelError

_REPACKS = "support_avx512bf16_for_cpu"


def is_packed(param: Tensor) -> bool:
    """The tensor's bits are not numbers of its type, which must stay what it is."""
    return getattr(param, "quant_state", None) is not None


def check_packed(module: nn.Module) -> None:
    """Raises `ModelError` for weights that were packed for inference, as `FormatKept` tells."""
    for name, param in module.named_parameters():
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise ModelError(
                f"parameter '{name}' was packed by bitsandbytes for inference when the model ran in evaluation mode, and cannot be "
                "trained through; load the model again and give it to the engine first"
            )


class FormatKept:
    """On some CPUs a layer of bitsandbytes that runs in evaluation mode packs its weight anew, in place and rounded, and it cannot be
    trained through afterwards. Not until `remove`: each rank's weights stay as they are, and evaluation computes what training does."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [m for m in module.modules() if getattr(m, _REPACKS, False)]
        for layer in self._layers:
            setattr(layer, _REPACKS, False)

    def remove(self) -> None:
        for layer in self._layers:
            setattr(layer, _REPACKS, True)
