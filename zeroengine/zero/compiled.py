"""Modules that torch.compile runs as one, for the hooks of stage 3.

torch.compile traces a module together with its hooks and those of everything inside it. What gathers parameters must not be traced,
so such a module is one unit: nothing inside has a hook, and the values of all its parameters are brought before the compiled code
begins, and let go after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def compiled_modules(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in `root` on which `compile()` was called, or which `torch.compile` returned."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module._compiled_call_impl is not None or is_wrapper(module):
            yield module
        else:
            waiting.extend(m for m in module._modules.values() if m is not None)


def is_wrapper(module: nn.Module) -> bool:
    """What `torch.compile(module)` returns: its own hooks are outside of what is compiled."""
    made = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nobody compiles
    return made is not None and isinstance(module, made.OptimizedModule)


class AroundCompiled:
    """Calls `enter(module, args)` before the compiled call of a module and `leave(module, args, output)` after it, also after an
    exception. `remove` takes it off again."""

    def __init__(self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._module = module
        run = module._compiled_call_impl
        if run is None:
            raise RuntimeError(f"{type(module).__name__} is not compiled")
        self._run = run

        def around(*args: Any, **kwargs: Any) -> Any:
            enter(module, args)
            output = None
            try:
                output = run(*args, **kwargs)
                return output
            finally:
                leave(module, args, output)

        self._around = around
        module._compiled_call_impl = around

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._around:
            self._module._compiled_call_impl = self._run
