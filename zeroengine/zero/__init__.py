"""The mechanism: buckets, the stage table, residency, prefetch, reduction; and the public names of `deepspeed.zero`."""

from zeroengine.zero.gathered import GatheredParameters
from zeroengine.zero.init import Init
from zeroengine.zero.meta import materialize
from zeroengine.zero.policy import STAGES, Policy

__all__ = ["STAGES", "GatheredParameters", "Init", "Policy", "materialize"]
