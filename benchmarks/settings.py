"""What is measured: one frozen description that the parent sends to every process. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Dtype = Literal["fp32", "bf16"]
DeepSpeedAdam = Literal["fused", "torch", "cpu"]


@dataclass(frozen=True)
class Settings:
    """Model, data and optimizer, the same for all systems. The defaults give a GPT of 63.1 million parameters."""

    hidden: int = 768
    layers: int = 8
    vocab: int = 8192
    sequence: int = 128
    micro_batch: int = 2
    accumulation: int = 1
    dtype: Dtype = "fp32"
    nproc: int = 2
    threads: int = 1
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 1234
    deepspeed_adam: DeepSpeedAdam = "fused"
    folder: str = ""  # of systems that keep state on a disk

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "vocab", "sequence", "micro_batch", "accumulation", "nproc", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of 64, or less than 128")

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def parameters(self) -> int:
        """Of the model, the tied head counted once."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (self.vocab + self.sequence + 2) * self.hidden

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
