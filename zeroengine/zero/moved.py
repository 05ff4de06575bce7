"""What `param.grad` is after backward: a mark that the engine has the gradient, not its values.

The gradient of a parameter goes into its bucket as soon as it is finished, where micro-batches and ranks are summed.
`param.grad is None` keeps its meaning; using the values, as `torch.nn.utils.clip_grad_norm_` does, is an error that
names what to use. A plain None would be passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import MovedGradientError
from zeroengine.offload.home import stub
from zeroengine.zero.residency import METADATA, slot_of


class MovedGradient(Tensor):
    """Shape, dtype and device of a gradient that lies in a bucket. Its memory is one shared NaN element."""

    _name: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA and not (func is Tensor.type and (len(args) > 1 or kwargs)):
                return func(*args, **(kwargs or {}))
            if func is Tensor.__repr__:
                return f"MovedGradient('{args[0]._name}', shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        # The arguments may hold it deep down (a list of gradients): the first parameter's name tells enough.
        names = [a._name for a in _flat(args) if isinstance(a, MovedGradient)]
        raise MovedGradientError(
            f"the gradient of parameter '{names[0] if names else '?'}' is not in `.grad` ({getattr(func, '__name__', func)}): "
            "the engine has moved it to where gradients of micro-batches and ranks are summed. To clip, set "
            "`gradient_clipping` in the configuration; for the norm call engine.get_global_grad_norm() after engine.step(); "
            "for the values "
            "zeroengine.utils.safe_get_full_grad(param) on all ranks; to forget it engine.zero_grad()"
        )


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (tuple, list)):
        return [leaf for value in values for leaf in _flat(value)]
    return [values]


def mark_for(param: nn.Parameter) -> MovedGradient:
    """The mark of `param`. Call with torch functions of subclasses disabled."""
    mark: MovedGradient = stub(param.shape, param.dtype, param.device).as_subclass(MovedGradient)
    slot = slot_of(param)
    mark._name = slot.name if slot is not None else "?"
    return mark
