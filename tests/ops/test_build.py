"""Finding, building and choosing libraries: with a compiler, without, with a broken one, from a checkout and from a wheel."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.toolbox import NEEDS_COMPILER, REAL, compiler_works, tiny_sources
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.logging import logger
from zeroengine.ops import FusedAdam, build, prebuilt, report
from zeroengine.ops.registry import OPERATIONS, choose
from zeroengine.ops.sources import csrc
from zeroengine.ops.toolchain import Compiler, find_cxx

ROOT = Path(__file__).resolve().parent.parent.parent

STEP = """
import torch
from zeroengine.ops import FusedAdam, choose, library
p = torch.nn.Parameter(torch.ones(9))
p.grad = torch.ones(9)
for _ in range(2):
    FusedAdam([p], lr=0.5).step()
print(library("update").reason)
print(choose("update", p.device).implementation, p[0].item())
"""


def run(code: str, cwd: Path = ROOT, **env: str) -> tuple[list[str], list[str]]:
    """Lines of output and of error output of a fresh process."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=whole, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Messages of the package's log, as they come."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep = Keep()
    logger.addHandler(keep)
    yield lines
    logger.removeHandler(keep)


def missing(reason: str, said: list[str]) -> None:
    """The library is not there for `reason`, that is said once, and an optimizer works."""
    found = build.library("update")
    assert not found and reason in found.reason and "\n" not in found.reason, found.reason
    p = torch.nn.Parameter(torch.ones(9))
    p.grad = torch.ones(9)
    FusedAdam([p], lr=0.5).step()
    assert choose("update", p.device).implementation == "twin" and p[0].item() == 0.5
    assert len(said) == 1 and found.reason in said[0] and "torch" in said[0]


@pytest.fixture(autouse=True)
def default_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZE_OPS", raising=False)


def test_where_there_is_a_compiler_the_library_is_native() -> None:
    """In the cache of this machine: that it is built anew is seen by `test_from_a_wheel`."""
    found = build.find("update")
    assert bool(found) is compiler_works(), found.reason
    for op in OPERATIONS.values():
        assert choose(op.name, torch.device("cpu")).implementation == ("native" if found else "twin")


def test_no_compiler(tmp_path: Path) -> None:
    out, said = run(STEP, ZE_CACHE_DIR=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert "no C++ compiler" in out[0] and "CXX" in out[0]
    assert out[1] == "twin 0.0"
    assert len(said) == 1 and out[0] in said[0] and "torch" in said[0]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "--version ends with exit code 3"),
        ('[ "$1" = --version ] && echo broken 1.0 || { echo "error: out of ideas" >&2; exit 1; }', "error: out of ideas"),
        ('[ "$1" = --version ] && echo broken 1.0 || exit 1', "failed: exit code 1"),
        ('[ "$1" = --version ] && echo liar 1.0; exit 0', "made no library"),
    ],
    ids=["does not answer", "fails", "fails silently", "makes nothing"],
)
def test_a_broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], script: str, reason: str) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("ZE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    missing(reason, said)


def test_a_compiler_that_answers_is_taken_where_another_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no compiler")
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    (tmp_path / "g++").symlink_to(real)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_cxx()
    assert isinstance(found, Compiler) and found.command == ("g++",)
    (tmp_path / "g++").unlink()
    assert find_cxx() == "the C++ compiler (c++) does not work: --version ends with exit code 1"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    missing("cannot be written", said)


@pytest.mark.parametrize("command", ['g++ "-O2', "   "])
def test_a_command_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], command: str) -> None:
    monkeypatch.setenv("CXX", command)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ZE_CACHE_DIR", str(tmp_path))
    missing("not a command: No closing quotation" if command.strip() else "no C++ compiler", said)


@NEEDS_COMPILER
def test_a_library_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    other = tmp_path / "other-cxx"
    build_it = f'case "$*" in *" -c "*) ;; *) for o; do :; done; {REAL} -shared -x c++ /dev/null -o "$o";; esac'
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo other 1.0 && exit 0\n{build_it}\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    monkeypatch.setenv("ZE_CACHE_DIR", str(tmp_path / "cache"))
    missing("has no function ze_", said)


@NEEDS_COMPILER
def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZE_CACHE_DIR", "cache")
    found = build.find("aio")
    assert found and found.path is not None and found.path.is_absolute(), found.reason
    whole = found.path.read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / found.path.name).write_bytes(whole[: len(whole) * 2 // 3])
    out, said = run(
        "from zeroengine.ops import build\nfound = build.find('aio')\nprint(bool(found), found.path.stat().st_size)", ZE_CACHE_DIR=str(copy)
    )
    assert out == [f"True {len(whole)}"] and not said


def test_the_report_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZE_CACHE_DIR", "~no-such-user/cache")
    assert "set ZE_CACHE_DIR" in report._cache()


def test_other_ranks_of_a_host_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert not build.library("update") and not said


def test_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZE_OPS", "twin")
    found = build.library("update")
    assert not found and found.reason == "ZE_OPS=twin"
    monkeypatch.setenv("ZE_OPS", "fast")
    with pytest.raises(ConfigError, match="ZE_OPS=fast"):
        build.library("update")
    monkeypatch.setenv("ZE_OPS", "native")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    monkeypatch.setenv("ZE_CACHE_DIR", str(tmp_path))
    with pytest.raises(ZeroEngineError, match="ZE_OPS=native.*missing"):
        build.library("update")


def test_an_unknown_library_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ZeroEngineError, match="nothing_of_the_kind"):
        build.find("nothing_of_the_kind")


def test_building_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from zeroengine.ops.build import library; library('update'); assert 'torch' not in sys.modules"
    run(code, ZE_CACHE_DIR=str(tmp_path), CXX=str(tmp_path / "missing"))


@NEEDS_COMPILER
def test_a_prebuilt_library_must_fit(tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    sources = tiny_sources(tmp_path)
    path = prebuilt.build(sources, Compiler((REAL,), "some compiler 1.0"), folder)
    assert prebuilt.find(sources, folder) == path
    assert sorted(p.name for p in folder.iterdir()) == ["tiny.json", "tiny.so"]
    about = (folder / "tiny.json").read_text()
    (folder / "tiny.json").write_text(about.replace('"needs": [', '"needs": ["a_unit_of_the_future", '))
    assert prebuilt.find(sources, folder) is None
    (folder / "tiny.json").write_text(about)
    assert prebuilt.find(tiny_sources(tmp_path, answer=1), folder) is None
    assert prebuilt.find(sources, tmp_path / "nowhere") is None


def wheel(folder: Path, prebuild: str) -> Path:
    """A wheel made from a copy of the sources, so that the checkout stays as it is."""
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        for name in ("zeroengine", "csrc", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"):
            subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True, timeout=60)
    out = folder / f"wheel{prebuild}"
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(out), "-b", str(folder / f"b{prebuild}")]
    env = {**os.environ, "ZE_BUILD_OPS": prebuild}
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = out.glob("*.whl")
    return made


@NEEDS_COMPILER
@pytest.mark.ranks
@pytest.mark.parametrize("prebuild", ["0", "1"])
def test_from_a_wheel(tmp_path: Path, prebuild: str) -> None:
    made = wheel(tmp_path, prebuild)
    assert made.name.endswith("none-any.whl") is (prebuild == "0"), made.name
    assert made.name.split("-")[2] == "py3"
    site = tmp_path / "site"
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    assert (site / "zeroengine" / "csrc" / "update" / "update.cpp").exists()
    built = {p.name for p in site.glob("zeroengine/ops/prebuilt/*.so")}
    assert ("update.so" in built) is (prebuild == "1") and "heap.so" not in built  # it belongs to the torch that it will run with
    env = {"PYTHONPATH": str(site), "ZE_CACHE_DIR": str(tmp_path / "cache")}
    if prebuild == "1":
        env |= {"PATH": str(tmp_path), "CXX": ""}  # on a machine without a compiler
    out, said = run(STEP, cwd=tmp_path, **env)
    assert out == [["built on this machine", "built with the package"][int(prebuild)], "native 0.0"]
    assert not said


def test_the_sources_are_found() -> None:
    assert csrc() == ROOT / "csrc"
