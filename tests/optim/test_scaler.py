"""The loss scale against tables worked out by hand from the rules in the docstring of `LossScaler`."""

from __future__ import annotations

import random

import pytest

from zeroengine.config import Config, Fp16Section
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.optim.scaler import LossScaler


def _scales(scaler: LossScaler, pattern: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` a good step."""
    result = []
    for step in pattern:
        scaler.update(step == "x")
        result.append(scaler.scale)
    return result


def _dynamic(scale: float = 256.0, window: int = 2, hysteresis: int = 1, consecutive: bool = False, minimum: float = 1.0) -> LossScaler:
    return LossScaler(scale, dynamic=True, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, min_scale=minimum)


@pytest.mark.parametrize(
    ("options", "pattern", "expected"),
    [
        # Window 2: the first good step does not count, the third doubles, then every second.
        ({}, "......", [256, 256, 512, 512, 1024, 1024]),
        # Without credit every overflow halves; the window starts anew after it.
        ({}, "x..x...", [128, 128, 128, 64, 64, 64, 128]),
        ({}, "xxx", [128, 64, 32]),
        # A window of 1 doubles from the second good step on.
        ({"window": 1}, "....x..", [256, 512, 1024, 2048, 1024, 1024, 2048]),
        # Hysteresis 3: two overflows are free, and then all count until the scale is doubled (restoring the credit).
        ({"hysteresis": 3}, "xxxx", [256, 256, 128, 64]),
        ({"hysteresis": 3}, "x.x.x.x", [256, 256, 256, 256, 128, 128, 64]),
        ({"hysteresis": 2}, "xx...xx", [256, 128, 128, 128, 256, 256, 128]),
        # Consecutive: a good step restores the credit, so only overflows in a row cut.
        ({"hysteresis": 2, "consecutive": True}, "x.x.xx.x", [256, 256, 256, 256, 256, 128, 128, 128]),
        # At the minimum nothing happens, and it comes back from there.
        ({"scale": 4.0, "minimum": 1.0}, "xxxxx...", [2, 1, 1, 1, 1, 1, 1, 2]),
        ({"scale": 1.0, "minimum": 0.4}, "xxx", [0.5, 0.4, 0.4]),
        ({"scale": 1.0, "minimum": 8.0}, ".x", [8, 8]),
    ],
)
def test_tables(options, pattern: str, expected: list[float]) -> None:
    assert _scales(_dynamic(**options), pattern) == expected


def test_overflows_at_the_minimum_are_counted_in_a_row() -> None:
    scaler = _dynamic(scale=2.0)
    counts = []
    for step in "xxxx.xx":
        scaler.update(step == "x")
        counts.append(scaler.overflows_at_minimum)
    assert counts == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_resume_gives_the_same_sequence(hysteresis: int, consecutive: bool) -> None:
    numbers = random.Random(hysteresis)
    pattern = "".join("x" if numbers.random() < 0.3 else "." for _ in range(120))
    whole = _scales(_dynamic(16.0, 3, hysteresis, consecutive), pattern)
    assert len(set(whole)) > 3
    for stop in range(0, 120, 7):
        first = _dynamic(16.0, 3, hysteresis, consecutive)
        before = _scales(first, pattern[:stop])
        second = _dynamic(16.0, 3, hysteresis, consecutive)
        second.load_state_dict(first.state_dict())
        assert before + _scales(second, pattern[stop:]) == whole
        assert second.overflows_at_minimum >= 0


def test_every_entry_of_the_state_is_needed() -> None:
    scaler = _dynamic()
    for name in scaler.state_dict():
        state = scaler.state_dict()
        del state[name]
        with pytest.raises(CheckpointError, match=name):
            _dynamic().load_state_dict(state)


def test_static_and_unit_never_change() -> None:
    for scaler, scale in ((LossScaler.unit(), 1.0), (LossScaler(1024.0), 1024.0)):
        assert _scales(scaler, "x.xx...." * 5) == [scale] * 40
        scaler.load_state_dict(LossScaler(64.0).state_dict())
        assert scaler.scale == scale, "a fixed scale comes from the configuration"


def test_a_state_of_the_other_kind_is_not_used() -> None:
    scaler = _dynamic()
    scaler.load_state_dict(LossScaler(2.0).state_dict())
    assert scaler.scale == 256.0


def test_from_config() -> None:
    def made(**fp16) -> LossScaler:
        return LossScaler.from_config(Config.load({"fp16": fp16}).fp16)

    assert (made(enabled=False).scale, made(enabled=False).kind) == (1.0, "static")
    assert (made(enabled=True, loss_scale=128).scale, made(enabled=True, loss_scale=128).kind) == (128.0, "static")
    scaler = made(enabled=True, initial_scale_power=5, loss_scale_window=7, hysteresis=4, min_loss_scale=0.5,
                  consecutive_hysteresis=True)  # fmt: skip
    assert (scaler.scale, scaler.window, scaler.hysteresis, scaler.min_scale) == (32.0, 7, 4, 0.5)
    assert scaler.is_dynamic and scaler.consecutive_hysteresis
    default = LossScaler.from_config(Fp16Section(enabled=True))
    assert (default.scale, default.window, default.hysteresis, default.min_scale) == (65536.0, 1000, 2, 1.0)


def test_limits() -> None:
    scaler = _dynamic(2.0**126, window=1)
    assert _scales(scaler, "......")[-1] == 2.0**127
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            LossScaler(wrong)
    with pytest.raises(ConfigError, match="initial_scale_power"):
        LossScaler.from_config(Fp16Section(enabled=True, initial_scale_power=2000))
    with pytest.raises(ConfigError, match="hysteresis"):
        LossScaler(1.0, dynamic=True, hysteresis=0)
