from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offload


@pytest.mark.ranks
def test_structure_of_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, systems = tmp_path / "offload.json", ["zeroengine-2", "zeroengine-2-nvme", "deepspeed-3-nvme"]
    tiny = ["--hidden", "32", "--layers", "1", "--vocab", "61", "--sequence", "16", "--rounds", "2", "--steps", "1", "--mib", "2"]
    arguments = ["--folder", str(tmp_path / "disk"), "--systems", ",".join(systems), "--json", str(out), *tiny]
    assert offload.main(arguments) == 0
    result = json.loads(out.read_text())
    for action in ("write", "read"):
        assert result["disk"][action]["dd"] > 0 and result["disk"][action]["ours"] > 0
    rows = result["systems"]
    assert list(rows)[:3] == ["limit", "zeroengine-2", "zeroengine-2-nvme"]
    assert rows["zeroengine-2"]["over_plain"]["median"] == 1.0
    assert rows["zeroengine-2-nvme"]["last_loss"] == rows["zeroengine-2"]["last_loss"]
    assert rows["zeroengine-2-nvme"]["report"]["memory"]["disk"] > 0
    assert "deepspeed-3-nvme" in {**result["skipped"], **rows}
    assert not [p for p in (tmp_path / "disk").iterdir() if p.name.startswith("benchmark")]
    assert "÷ dd" in capsys.readouterr().out


def test_unknown_systems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        offload.parse(["--folder", str(tmp_path), "--systems", "zeroengine-9-moon"])
