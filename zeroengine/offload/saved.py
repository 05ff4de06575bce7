"""A tensor that autograd saves and that stays where it is."""

from __future__ import annotations

from torch import Tensor


class SavedOther:
    """A saved tensor, with the version that torch itself would check."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # an output must be detached: the graph would hold itself alive through it
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was changed in place since forward "
                f"(version {self.version}, now {self.tensor._version}); use the out-of-place operation"
            )
        return self.tensor
