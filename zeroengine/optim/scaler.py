"""Loss scaling for fp16: a fixed scale, or one that follows the overflows."""

from __future__ import annotations

from typing import Any, Literal

from zeroengine.config import Fp16Section
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.logging import log_once

_LARGEST = 2.0**127  # the largest power of two in fp32, in which gradients are unscaled


class LossScaler:
    """The number that the loss is multiplied with, and the gradients divided by, in fp16.

    The dynamic scale (Micikevicius et al., "Mixed Precision Training", 2018) starts at `2**initial_scale_power`. It is
    halved by an overflow once the credit of `hysteresis` - 1 overflows is used up, never below `min_scale`, and doubled
    when `window` good steps have passed after the first good one since the last overflow, again every `window` good
    steps. Doubling restores the credit; with `consecutive_hysteresis` every good step does.

    At the minimum an overflow changes nothing. `overflows_at_minimum` counts them in a row.
    """

    def __init__(
        self,
        scale: float,
        *,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        """Raises `ConfigError` if a value is out of range."""
        if not 0 < scale <= _LARGEST:
            raise ConfigError(f"the loss scale is above 0 and at most 2**127, not {scale:g}")
        if window < 1 or hysteresis < 1 or min_scale <= 0:
            raise ConfigError(
                "loss_scale_window and hysteresis are 1 or more and min_loss_scale is above 0, "
                f"not {window}, {hysteresis} and {min_scale:g}"
            )
        self.scale = max(scale, min_scale) if dynamic else scale
        self.is_dynamic = dynamic
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = min_scale
        self.overflows_at_minimum = 0
        self._credit = hysteresis
        self._good_steps = 0

    @classmethod
    def unit(cls) -> LossScaler:
        """Scale 1 that never changes, for bf16 and fp32."""
        return cls(1.0)

    @classmethod
    def from_config(cls, section: Fp16Section) -> LossScaler:
        """The scaler that `fp16` asks for: `unit` if it is off, fixed if `loss_scale` is above 0, else dynamic."""
        if not section.enabled:
            return cls.unit()
        if section.loss_scale > 0:
            return cls(section.loss_scale)
        if section.initial_scale_power > 127:
            raise ConfigError(f"fp16.initial_scale_power is at most 127, not {section.initial_scale_power}")
        return cls(
            2.0**section.initial_scale_power,
            dynamic=True,
            window=section.loss_scale_window,
            hysteresis=section.hysteresis,
            consecutive_hysteresis=section.consecutive_hysteresis,
            min_scale=section.min_loss_scale,
        )

    @property
    def kind(self) -> Literal["static", "dynamic"]:
        """Whether the scale changes."""
        return "dynamic" if self.is_dynamic else "static"

    def update(self, found_non_finite: bool) -> None:
        """Once a step, the same on every rank: `found_non_finite` says that the step was skipped."""
        if not self.is_dynamic:
            return
        if found_non_finite:
            self._overflow()
        else:
            self._good_step()

    def _overflow(self) -> None:
        self._good_steps = 0
        if self._credit > 1:
            self._credit -= 1
        elif self.scale > self.min_scale:
            self.scale = max(self.scale / 2.0, self.min_scale)
        else:
            self.overflows_at_minimum += 1

    def _good_step(self) -> None:
        self.overflows_at_minimum = 0
        self._good_steps += 1
        if self.consecutive_hysteresis:
            self._credit = self.hysteresis
        # The first good step after an overflow is not part of the window.
        passed = self._good_steps - 1
        if passed > 0 and passed % self.window == 0:
            self.scale = min(self.scale * 2.0, _LARGEST)
            self._credit = self.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """All that the future scales depend on, besides the configuration."""
        return {
            "kind": self.kind,
            "scale": self.scale,
            "credit": self._credit,
            "good_steps": self._good_steps,
            "overflows_at_minimum": self.overflows_at_minimum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. A state of the other kind of scaler is not used: the configuration was changed.

        Raises `CheckpointError` if an entry is missing.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(f"the state of the loss scaler lacks {', '.join(missing)}")
        if state["kind"] != self.kind:
            log_once(f"the loss scale was {state['kind']} in the checkpoint and is {self.kind} now: it starts afresh")
            return
        if not self.is_dynamic:
            return
        self.scale = min(max(float(state["scale"]), self.min_scale), _LARGEST)
        self._credit = min(int(state["credit"]), self.hysteresis)
        self._good_steps = int(state["good_steps"])
        self.overflows_at_minimum = int(state["overflows_at_minimum"])
