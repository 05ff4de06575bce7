"""For ranks that use transformers with zeroengine in the place of deepspeed, which has to be there before it."""

from __future__ import annotations

import zeroengine.integrations.deepspeed  # noqa: F401  # isort: skip

from tests.preload.engine import load

load("accelerate", "accelerate.utils.deepspeed", "peft", "transformers.trainer", "transformers.models.auto.modeling_auto")
