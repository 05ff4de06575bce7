"""A parameter whose values are elsewhere.

While its bucket is released a parameter stays the same Python object: same `shape`, `numel()`, `dtype`,
`requires_grad`, identity. Only its class is exchanged (as torch's own `UninitializedParameter` does) for
`ReleasedParameter`, whose `__torch_function__` sees every operation that would read the values. Inside a forward or
backward of the engine the operation gathers the bucket and runs; outside it raises, naming the parameter and the remedy.
Its memory is one shared NaN element, expanded: even C++ code that bypasses `__torch_function__` reads NaN, never freed
memory and never a plausible value.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroengine.offload.home import stub

_T = torch.Tensor


class ValueSource(Protocol):
    """Who can bring the values of a released parameter (the sharder that owns its bucket)."""

    def using(self, param: ReleasedParameter, function: str) -> AbstractContextManager[None]:
        """Context of one operation that reads `param`: its values are whole inside, and what autograd saves of them is a
        reference into the bucket. Raises `ReleasedParameterError` where they may not be gathered."""
        ...

    def computing(self) -> bool:
        """Whether the values of a parameter that is detached now are asked for now (in a forward or backward)."""
        ...

    def write(self, param: ReleasedParameter, values: Tensor) -> bool:
        """Makes `values` (whole, equal on all ranks) the values of `param` without gathering it: each rank keeps its part.
        False if the values are in use now, or autograd would have to see it."""
        ...


@dataclass
class Slot:
    """The one attribute that the engine adds to a parameter (`param._zero`)."""

    name: str
    bucket: Any
    index: int
    cls: type = nn.Parameter
    source: ValueSource | None = None
    stub: Tensor | None = field(default=None, repr=False)
    active: int = 0  # running modules that own the parameter

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_slot, ()  # a pickled parameter is nobody's


def _no_slot() -> None:
    return None


def slot_of(param: Tensor) -> Slot | None:
    """The engine's record of `param`, None if no engine holds it."""
    return getattr(param, "_zero", None)


def _getters(*names: str) -> list[Any]:
    return [getattr(_T, n).__get__ for n in names if hasattr(_T, n)]


def _setters(*names: str) -> list[Any]:
    accessors = [getattr(_T, n) for n in names if hasattr(_T, n)]
    return [getattr(a, m) for a in accessors for m in ("__set__", "__delete__")]


# Operations that need no values.
METADATA: frozenset[Any] = frozenset(
    _getters(
        "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "names", "_version",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
        "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "itemsize", "nbytes", "_grad",
        "is_sparse_csr", "is_ipu", "is_xla", "is_vulkan", "is_mtia", "is_maia", "_base",
    )
    + _setters("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    + [
        _T.size, _T.numel, _T.nelement, _T.dim, _T.ndimension, _T.element_size, _T.is_floating_point, _T.is_complex,
        _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad, _T.get_device,
        _T.is_same_size, _T.__len__, _T.__hash__, _T.is_signed, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full,
        _T.is_shared, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.empty_like,
        torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like, torch.is_tensor,
        torch.result_type, _T.is_inference, torch.is_inference, _T.type,
    ]
)  # fmt: skip


# `nn.Parameter(other_parameter)` insists that `detach` gives the class of the other, which parametrizations rely on.
_MAKES_PARAMETER = nn.Parameter.__new__.__code__


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class ZeroParamStatus(enum.Enum):
    """Where the values of a parameter are, for scripts that ask `param.ds_status`. Plain parameters have no such attribute."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ReleasedParameter(nn.Parameter):
    """Class of a parameter while its values are sharded away. See the module's docstring.

    The `ds_` attributes are those by which scripts written for DeepSpeed find parameters to gather."""

    _zero: Slot

    @property
    def ds_id(self) -> int:
        return id(self)

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        return self.shape

    @property
    def ds_numel(self) -> int:
        return self.numel()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            known, answer = _described(func, args, kwargs)
            if known:
                return answer
            if func is _T.__repr__:
                p = args[0]
                facts = f"shape={tuple(p.shape)}, dtype={p.dtype}, requires_grad={p.requires_grad}"
                return f"ReleasedParameter('{p._zero.name}', {facts})"
            makes_parameter = func is _T.detach and sys._getframe(1).f_code is _MAKES_PARAMETER
            source = args[0]._zero.source if func is _T.detach else None
            if source is not None and not makes_parameter and not source.computing():
                return ReleasedAlias.of(args[0])
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, ReleasedAlias) for leaf in leaves):
                return _with_aliases(func, args, kwargs)
            if func is _T.copy_ and isinstance(args[0], ReleasedParameter) and _copied(args[0], *args[1:], **kwargs):
                return args[0]
            with ExitStack() as uses:
                for leaf, source in _sources(leaves):
                    uses.enter_context(source.using(leaf, getattr(func, "__name__", str(func))))
                result = func(*args, **kwargs)
                if makes_parameter:
                    return _T._make_subclass(args[0]._zero.cls, result)
                return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy_of = getattr(self._zero.source, "copy_of", None)
        if copy_of is None:
            return nn.Parameter.__deepcopy__(self, memo)
        result: nn.Parameter = copy_of(self)
        memo[id(self)] = result
        return result


@functools.cache
def released(cls: type) -> type[ReleasedParameter]:
    """The class of a released parameter that is a `cls` when it is whole. It has the name of `cls` if that is not torch's own: peft
    counts the packed weights of bitsandbytes by it."""
    return ReleasedParameter if cls is nn.Parameter else type(cls.__name__, (ReleasedParameter,), {})


class ReleasedAlias(Tensor):
    """What `detach` gives of a released parameter outside of computations: `state_dict()` does it for all of them, mostly for
    their names and shapes. It knows those; an operation that needs values asks the parameter for them, as one on the parameter
    would, and so raises where an engine has sharded it away. Writes reach the parameter."""

    _param: ReleasedParameter

    @classmethod
    def of(cls, param: ReleasedParameter) -> ReleasedAlias:
        alias = _T._make_subclass(cls, stub(param.shape, param.dtype, param.device))
        alias._param = param
        return alias

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            known, answer = _described(func, args, kwargs)
            if known:
                return answer
            if func is _T.__repr__:
                return f"ReleasedAlias(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
            if func is _T.detach:
                return args[0]
        return _with_aliases(func, args, kwargs)


def _with_aliases(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `func` on the values of the parameters in the place of their aliases."""
    with ExitStack() as uses:

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, ReleasedAlias):
                return leaf
            slot = slot_of(leaf._param)
            if slot is not None and slot.source is not None and _needs_source(leaf._param, slot):
                uses.enter_context(slot.source.using(leaf._param, getattr(func, "__name__", str(func))))
            with torch._C.DisableTorchFunctionSubclass():
                return leaf._param.detach()

        args, kwargs = tree_map(values, (args, kwargs))
        return func(*args, **kwargs)


def _needs_source(param: nn.Parameter, slot: Slot) -> bool:
    """Released, or whole until another one of its source is brought."""
    return isinstance(param, ReleasedParameter) or getattr(slot.source, "whole_on_use", False)


def _described(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    """(True, answer) if `func` asks for nothing but what is known without values."""
    if func in METADATA and not (func is _T.type and (len(args) > 1 or kwargs)):
        return True, func(*args, **kwargs)
    if func is _T.stride and len(args) == 1 and not kwargs:
        return True, _contiguous_strides(args[0].shape)
    return func is _T.is_contiguous, True


def _sources(leaves: list[Any]) -> list[tuple[Any, ValueSource]]:
    """The parameters among `leaves` to ask for, and whom. Those that are whole already, of a source that may release them
    when it brings another, come first."""
    whole: list[tuple[Any, ValueSource]] = []
    released: list[tuple[Any, ValueSource]] = []
    for leaf in leaves:
        slot = slot_of(leaf) if isinstance(leaf, nn.Parameter) else None
        if slot is None or slot.source is None:
            continue
        if isinstance(leaf, ReleasedParameter):
            released.append((leaf, slot.source))
        elif _needs_source(leaf, slot):
            whole.append((leaf, slot.source))
    return whole + released


def _copied(param: ReleasedParameter, src: Any, non_blocking: bool = False) -> bool:
    """`param.copy_(src)`, as `load_state_dict` calls it, done on the shards."""
    source = param._zero.source
    if source is None or not isinstance(src, Tensor) or isinstance(src, ReleasedParameter):
        return False
    return source.write(param, src)


def show(params: Iterable[nn.Parameter], values: Iterable[Tensor]) -> None:
    """Gives parameters their values. Their class stays as it is: `activate` says who may use them as plain ones."""
    with torch._C.DisableTorchFunctionSubclass():
        for param, value in zip(params, values, strict=True):
            param.data = value


def hide(params: Iterable[nn.Parameter]) -> None:
    """Takes the values of parameters away."""
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            slot: Slot = param._zero  # type: ignore[attr-defined]
            if slot.stub is None:
                slot.stub = stub(param.shape, slot.bucket.dtype, slot.bucket.device)
            param.data = slot.stub
            param.__class__ = released(slot.cls)


def activate(param: nn.Parameter) -> None:
    """The module that owns `param` runs: until `deactivate` it is a plain parameter, at no cost per operation."""
    slot: Slot = param._zero  # type: ignore[attr-defined]
    slot.active += 1
    if slot.active == 1:
        param.__class__ = slot.cls


def deactivate(param: nn.Parameter) -> None:
    """Uses from elsewhere go through `ReleasedParameter` again, whether or not the values are still gathered."""
    slot: Slot = param._zero  # type: ignore[attr-defined]
    slot.active -= 1
    if slot.active == 0:
        param.__class__ = released(slot.cls)
