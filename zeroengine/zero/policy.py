"""The table of ZeRO stages: what stays whole between uses. No other file decides by the number of a stage what is cut.

Stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroengine.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """What a bucket keeps only its own slice of, between uses."""

    shard_params: bool
    shard_grads: bool
    shard_state: bool  # masters and optimizer state

    def slices_gradients(self, ranks: int, *, last: bool) -> bool:
        """Whether a rank has its slice alone of what is reduced, and no whole buffer. `last`: the reduction follows before other
        micro-batches are added. A shard group of one (`ranks`) has no smaller slice."""
        return self.shard_grads or (self.shard_state and last and ranks > 1)


STAGES: dict[int, Policy] = {
    0: Policy(shard_params=False, shard_grads=False, shard_state=False),
    1: Policy(shard_params=False, shard_grads=False, shard_state=True),
    2: Policy(shard_params=False, shard_grads=True, shard_state=True),
    3: Policy(shard_params=True, shard_grads=True, shard_state=True),
}


def policy_for(stage: int, *, ranks: int | None = None, persistent: bool = False) -> Policy:
    """The row of `stage`; small parameters that stay resident (`persistent`) keep their values whole. In a shard group of one (`ranks`)
    the slice is the whole: gradients are added up where they stay, as where they are kept whole, and not in a second buffer."""
    if stage not in STAGES:
        raise ConfigError(f"zero_optimization.stage is {stage}; it must be one of {sorted(STAGES)}")
    row = STAGES[stage]
    return Policy(row.shard_params and not persistent, row.shard_grads and ranks != 1, row.shard_state)
