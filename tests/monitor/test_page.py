"""The page in a browser: a pipeline with experts, whose report has every plot."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.jobs import pipelined
from tests.monitor.page_check import Page, faults
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
WIDTH, HEIGHT = 1000, 2800
PLOTS = ("memory", "timeline", "exposed", "experts", "loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelined")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(pipelined, 2, str(folder), timeout=120)


def test_every_plot_is_drawn_and_says_what_the_figures_say(ranks: list[dict[str, Any]]) -> None:
    for got in ranks:
        assert not faults(got["page"], got["report"])
    page, plots = Page(ranks[0]["page"]), ranks[0]["report"]["plots"]
    assert set(page.shapes) == {*PLOTS, "resident"} and set(plots) == set(PLOTS)
    assert page.shapes["timeline"]["rect"] == sum(len(row["spans"]) for row in plots["timeline"]["rows"])
    assert page.shapes["memory"]["polygon"] == len(plots["memory"]["kinds"]) and page.shapes["loss"]["polyline"] == 1
    assert page.shapes["experts"]["rect"] == sum(len(layer["load"]) for layer in plots["experts"]["layers"])
    assert page.shapes["exposed"]["rect"] == len(plots["exposed"]["phases"]) * 2


def test_a_pipeline_reports_all_stages(ranks: list[dict[str, Any]], folder: Path) -> None:
    report = ranks[0]["report"]
    assert report["run"]["mesh"] == {"pp": 2} and len(report["experts"]) == 2
    assert all(sum(layer["load"]) == 3 * 2 * 5 for layer in report["experts"]), report["experts"]
    assert any(row["operation"] == "send" and row["dims"] == "pp" and row["measured"] > 0 for row in report["traffic"])
    assert report["plots"]["loss"]["values"] == pytest.approx(ranks[0]["losses"], rel=1e-6)
    names = [name for lane, name, *_ in report["plots"]["timeline"]["rows"][0]["spans"] if lane == "phase"]
    assert names.count("forward") == names.count("backward") == 3
    assert (
        dict(zip([p["phase"] for p in report["time"]["phases"]], [p["measured"] for p in report["time"]["phases"]], strict=True))["idle"]
        > 0
    )
    events = (folder / "pipe" / "events.jsonl").read_text()
    assert events.count("/load") == 2 * 4 and "send" in ranks[0]["summary"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_opens_in_a_browser(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(ranks[0]["page"])
    shot = tmp_path / "page.png"
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}",
        (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert shot.exists(), done.stderr[-2000:]
    pixels = _pixels(shot.read_bytes())
    colours: dict[tuple[int, int, int], int] = {}
    for at in range(0, len(pixels), 3):
        colour = (pixels[at], pixels[at + 1], pixels[at + 2])
        colours[colour] = colours.get(colour, 0) + 1
    total = WIDTH * HEIGHT
    assert colours[255, 255, 255] < 0.97 * total, "the page is blank"
    for name, rgb in {"compute": (0x4C, 0x78, 0xA8), "waiting": (0xE4, 0x57, 0x56), "idle": (0xC9, 0xCC, 0xD3)}.items():
        assert colours.get(rgb, 0) > 50, f"nothing is drawn in the colour of {name}"


def _pixels(png: bytes) -> bytes:
    """RGB of a PNG of 8 bits without interlacing."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, width, height, channels = 8, b"", 0, 0, 3
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
            assert body[8] == 8 and body[12] == 0
            channels = {2: 3, 6: 4}[body[9]]
        elif kind == b"IDAT":
            data += body
        at += 12 + size
    raw, line = zlib.decompress(data), width * channels
    rows: list[bytearray] = []
    for y in range(height):
        start = y * (line + 1)
        rows.append(_unfiltered(raw[start], raw[start + 1 : start + 1 + line], rows[-1] if rows else bytearray(line), channels))
    if channels == 3:
        return b"".join(rows)
    return b"".join(bytes(row[i + c] for i in range(0, line, 4) for c in range(3)) for row in rows)


def _unfiltered(kind: int, data: bytes, above: bytearray, channels: int) -> bytearray:
    row = bytearray(data)
    if kind == 0:
        return row
    for i in range(len(row)):
        left = row[i - channels] if i >= channels else 0
        corner = above[i - channels] if i >= channels else 0
        if kind == 1:
            add = left
        elif kind == 2:
            add = above[i]
        elif kind == 3:
            add = (left + above[i]) // 2
        else:
            guess = left + above[i] - corner
            near = [(abs(guess - v), n, v) for n, v in enumerate((left, above[i], corner))]
            add = min(near)[2]
        row[i] = (row[i] + add) & 255
    return row
