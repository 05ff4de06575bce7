"""`zerorun env`."""

from __future__ import annotations

import json

import pytest

from zeroengine.launcher.cli import COMMANDS, main
from zeroengine.ops import report
from zeroengine.ops.registry import OPERATIONS


def test_it_says_what_runs_and_why_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "env" in COMMANDS
    monkeypatch.setenv("ZE_OPS", "twin")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for title in ("versions", "machine", "devices", "compilers", "operations"):
        assert f"{title}\n" in out
    for name in OPERATIONS:
        assert f"{name} on cpu" in out
    assert "twin: ZE_OPS=twin" in out


def test_json_and_no_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", "--no-build"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert sections["versions"]["torch"] and sections["operations"] == {"": "not asked (--no-build)"}


def test_a_missing_native_library_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("ZE_OPS", "native")
    monkeypatch.setenv("CXX", f"{tmp_path}/missing")
    assert "cannot be run" in report.report()["operations"]["update on cpu"]
