"""Training and evaluation mode of a model whose parts need not be in the same."""

from __future__ import annotations

from torch import nn


class Modes:
    """The mode of each part of `module`, for `restore`: `train(True)` would wake those that its user has put to evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._of_parts = [(part, part.training) for part in module.modules()]

    def restore(self) -> None:
        self._module.train(self._of_parts[0][1])  # what follows the module without being a part of it
        for part, mode in self._of_parts:
            part.training = mode
