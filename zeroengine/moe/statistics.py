"""What routers did since the last step: load of each expert, drops, entropy. Counted on each rank, added up when asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.zero.hooks import in_backward


@dataclass(frozen=True)
class LayerStatistics:
    """Of one layer over the global batch since the last step: assignments of each expert [E] (wanted, before drops), those
    dropped, the mean entropy of a token's scores in nats (None where the router's scores are not seen), and the largest
    number of assignments that a rank computed over the mean (1 is even)."""

    load: tuple[int, ...]
    dropped: int
    entropy: float | None
    skew: float

    def show(self) -> str:
        """One line."""
        entropy = "" if self.entropy is None else f", entropy {self.entropy:.3f}"
        return f"busiest expert {self.imbalance:.2f} x the mean, busiest rank {self.skew:.2f} x, {self.dropped} dropped{entropy}"

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert over the mean."""
        return max(self.load) * len(self.load) / max(sum(self.load), 1)


class Statistics:
    """Sums of one rank. `computed`: assignments that this rank's experts took."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.clear()

    def clear(self) -> None:
        self._load: Tensor | None = None  # with the next two on the device, which is waited for when they are read
        self._dropped: Tensor | int = 0
        self._entropy: Tensor | float = 0.0
        self._scored = 0
        self.computed = 0

    @property
    def load(self) -> Tensor:
        """Assignments of each expert [E], int64 on the CPU."""
        return torch.zeros(self.num_experts, dtype=torch.int64) if self._load is None else self._load.cpu()

    @torch.no_grad()
    def record(self, index: Tensor, keep: Tensor | None, scores: Tensor | None, training: bool) -> None:
        """One forward in training. A recomputation of it is not counted again."""
        if not training or in_backward():
            return
        flat = index.reshape(-1)
        ones = torch.ones_like(flat, dtype=torch.int64)
        load = ones.new_zeros(self.num_experts) if self._load is None else self._load
        self._load = load.index_add(0, flat, ones)  # bincount would wait for the device
        if keep is not None:
            self._dropped = self._dropped + (keep.numel() - keep.sum())
        if scores is not None:
            shares = scores.float() / scores.float().sum(1, keepdim=True)
            self._entropy = self._entropy - (shares * shares.clamp_min(1e-30).log()).sum().double()
            self._scored += scores.shape[0]

    def row(self) -> Tensor:
        """As numbers to be added over ranks."""
        own = [float(self._dropped), float(self._entropy), float(self._scored)]
        return torch.cat([self.load.double(), torch.tensor(own, dtype=torch.float64)])

    @staticmethod
    def over(rows: Tensor, computed: Tensor) -> LayerStatistics:
        """Of all ranks' `row`s [ranks, E + 3] and `computed` [ranks]."""
        total = rows.sum(0)
        load = tuple(int(n) for n in total[:-3].tolist())
        dropped, entropy, scored = total[-3:].tolist()
        mean = float(computed.double().mean())
        skew = float(computed.max()) / mean if mean else 1.0
        return LayerStatistics(load, int(dropped), entropy / scored if scored else None, skew)
