"""Values of integers in a run on fake tensors: positions are known before any data are, and models look at them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST = 1 << 20  # elements: masks of every pair of tokens stay without values


class KnownIntegers(TorchDispatchMode):
    """Inside a fake mode: ranges of integers, and what is worked out from nothing but them, are real tensors.

    transformers looks into position ids for several documents in a row, and where it cannot it makes a mask of every pair of tokens for
    each block, which a run on ordinary batches does not have.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_known(func, args, kwargs):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_known(func: Any, args: Any, kwargs: Any) -> bool:
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if func.overloadpacket is torch.ops.aten.arange:
        numbers = [x for x in (*args, kwargs.get("dtype")) if x is not None]
        return not given and not any(isinstance(x, float) or (isinstance(x, torch.dtype) and x.is_floating_point) for x in numbers)
    return bool(given) and all(_is_integers(t) for t in given) and _extent(given) <= _MOST


def _is_integers(t: Tensor) -> bool:
    return not isinstance(t, FakeTensor) and t.device.type == "cpu" and not t.is_floating_point() and not t.is_complex()


def _extent(given: list[Tensor]) -> int:
    """Elements of these tensors put together, entry by entry or one by one."""
    try:
        return math.prod(torch.broadcast_shapes(*(t.shape for t in given)))
    except RuntimeError:
        return max(t.numel() for t in given)
