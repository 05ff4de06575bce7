"""The cache of built libraries: one build for all processes, whole files, failures with a reason, no lock left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.ops.toolbox import FLAGS, NEEDS_COMPILER, REAL, counting_compiler, links, tiny_sources
from zeroengine.ops import compile
from zeroengine.ops.cache import BuildFailed, Cache
from zeroengine.ops.compile import is_whole
from zeroengine.ops.toolchain import Compiler

pytestmark = NEEDS_COMPILER

ROOT = Path(__file__).resolve().parent.parent.parent

PROCESS = """
import sys
from pathlib import Path
from zeroengine.ops.cache import BuildFailed, Cache
from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler
folder = Path(sys.argv[1])
sys.stdin.readline()
try:
    path = Cache(folder / "cache").get(Sources(folder / "csrc", "tiny"), "k", Compiler((sys.argv[2],), "c"), sys.argv[3:])
except BuildFailed as failed:
    sys.exit(str(failed))
import ctypes
sys.exit(0 if ctypes.CDLL(str(path)).answer() == 42 else "wrong answer")
"""


def start(folder: Path, compiler: Compiler) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder), *compiler.command, *FLAGS]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def together(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Lets all of them go at once; (exit code, error output) of each."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = []
    for process in processes:
        _, error = process.communicate(timeout=120)
        ends.append((process.returncode, error))
    return ends


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in (folder / "cache").glob(".*")]


def test_a_library_is_built_once_and_found_again(tmp_path: Path) -> None:
    sources, (compiler, count) = tiny_sources(tmp_path), counting_compiler(tmp_path)
    cache = Cache(tmp_path / "cache")
    path = cache.get(sources, "k", compiler, FLAGS)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert cache.get(sources, "k", compiler, FLAGS) == path and links(count) == 1
    assert not leftovers(tmp_path)


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a b:c $d 'e'"
    folder.mkdir()
    path = Cache(folder / "cache").get(tiny_sources(folder), "k", Compiler((REAL,), ""), FLAGS)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_without_ninja_the_same_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroengine.ops.compile.find_ninja", lambda: None)
    path = Cache(tmp_path / "cache").get(tiny_sources(tmp_path), "k", Compiler((REAL,), ""), FLAGS)
    assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.ranks
def test_eight_processes_build_once(tmp_path: Path) -> None:
    tiny_sources(tmp_path)
    compiler, count = counting_compiler(tmp_path)
    assert together([start(tmp_path, compiler) for _ in range(8)]) == [(0, "")] * 8
    assert links(count) == 1


@pytest.mark.ranks
def test_processes_that_wait_share_a_failure(tmp_path: Path) -> None:
    tiny_sources(tmp_path)
    log = tmp_path / "tries"
    compiler, _ = counting_compiler(tmp_path, before=f"echo try >> {log}; sleep 2; echo 'fatal error: no' >&2; exit 1")
    ends = together([start(tmp_path, compiler) for _ in range(3)])
    assert all(code == 1 and "fatal error: no" in error for code, error in ends)
    assert len(log.read_text().splitlines()) < 3


@pytest.mark.ranks
def test_a_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    tiny_sources(tmp_path)
    slow, _ = counting_compiler(tmp_path, before=f"touch {tmp_path}/started; sleep 60")
    killed = start(tmp_path, slow)
    assert killed.stdin is not None
    killed.stdin.write("\n")
    killed.stdin.flush()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=20)
    compiler, count = counting_compiler(tmp_path)
    assert together([start(tmp_path, compiler)]) == [(0, "")]
    assert links(count) == 1 and not leftovers(tmp_path)


def test_what_the_compiler_says_is_the_reason(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path)
    (tmp_path / "csrc" / "tiny" / "tiny.cpp").write_text("int f() { return missing_name; }\n")
    with pytest.raises(BuildFailed, match="missing_name") as failed:
        Cache(tmp_path / "cache").get(sources, "k", Compiler((REAL,), ""), FLAGS)
    assert "\n" not in str(failed.value) and ".failed" in str(failed.value)
    assert not leftovers(tmp_path)
    tiny_sources(tmp_path)  # repaired: nothing of the failure stays in the way
    assert Cache(tmp_path / "cache").get(sources, "k", Compiler((REAL,), ""), FLAGS).exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildFailed, match="cannot be written.*ZE_CACHE_DIR"):
        Cache(tmp_path / "file" / "cache").get(tiny_sources(tmp_path), "k", Compiler((REAL,), ""), FLAGS)


def test_a_read_only_cache() -> None:
    """As another user where this one is root, who may write everywhere."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        sources, cache = tiny_sources(Path(name)), Cache(Path(name) / "cache")
        cache.folder.mkdir()
        cache.folder.chmod(0o555)
        Path(name).chmod(0o755)
        try:
            if root:
                os.seteuid(65534)
            with pytest.raises(BuildFailed, match="cannot be written .*cache.*Permission denied"):
                cache.get(sources, "k", Compiler((REAL,), ""), FLAGS)
        finally:
            if root:
                os.seteuid(0)


def test_a_library_that_is_there_needs_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tiny_sources(tmp_path), Cache(tmp_path / "cache")
    path = cache.get(sources, "k", Compiler((REAL,), ""), FLAGS)
    monkeypatch.setattr(os, "open", lambda *a, **k: pytest.fail("a lock was opened"))
    assert cache.get(sources, "k", Compiler(("/does/not/exist",), ""), FLAGS) == path


def test_again_builds_over_a_damaged_library(tmp_path: Path) -> None:
    sources, cache = tiny_sources(tmp_path), Cache(tmp_path / "cache")
    cache.folder.mkdir()
    (cache.folder / "tiny-k.so").write_text("damaged")
    path = cache.get(sources, "k", Compiler((REAL,), ""), FLAGS, again=True)
    assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.parametrize("harm", ["cut", "zeroed", "empty"])
def test_a_damaged_library_is_found_out_before_it_kills_the_process(tmp_path: Path, harm: str) -> None:
    path = Cache(tmp_path / "cache").get(tiny_sources(tmp_path), "k", Compiler((REAL,), ""), FLAGS)
    assert is_whole(path)
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes({"cut": data[:half], "zeroed": data[:half] + bytes(len(data) - half), "empty": b""}[harm])
    assert not is_whole(path) and not is_whole(tmp_path / "missing")


def test_a_failure_of_the_future_is_not_believed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.folder.mkdir()
    failed = cache.folder / "tiny-k.failed"
    failed.write_text("another host failed")
    os.utime(failed, (time.time() + 3600, time.time() + 3600))
    path = cache.get(tiny_sources(tmp_path), "k", Compiler((REAL,), ""), FLAGS)
    assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.parametrize("ninja", [True, False])
def test_a_compiler_that_hangs_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ninja: bool) -> None:
    if not ninja:
        monkeypatch.setattr(compile, "find_ninja", lambda: None)
    monkeypatch.setattr(compile, "_SECONDS", 2)
    hanging, pid = tmp_path / "hanging-cxx", tmp_path / "pid"
    hanging.write_text(f"#!/bin/sh\necho $$ >> {pid}\nsleep 500\n")
    hanging.chmod(0o755)
    with pytest.raises(BuildFailed, match="did not end within 2 s"):
        Cache(tmp_path / "cache").get(tiny_sources(tmp_path), "k", Compiler((str(hanging),), ""), FLAGS)
    pids = [int(line) for line in pid.read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_files_that_editors_leave_are_no_sources(tmp_path: Path) -> None:
    digest = tiny_sources(tmp_path).digest
    (tmp_path / "csrc" / "tiny" / ".#tiny.cpp").symlink_to("nobody@nowhere:1")
    (tmp_path / "csrc" / ".#shared.h").symlink_to("nobody@nowhere:1")
    sources = tiny_sources(tmp_path)
    assert sources.digest == digest and len(sources.units) == 1


def test_the_key_changes_with_everything_that_shapes_a_library(tmp_path: Path) -> None:
    keys = {tiny_sources(tmp_path, answer=1).key("g++", "-O3"), tiny_sources(tmp_path, answer=2).key("g++", "-O3")}
    keys |= {tiny_sources(tmp_path, answer=2).key("g++", "-O2"), tiny_sources(tmp_path, answer=2).key("clang++", "-O3")}
    assert len(keys) == 4
    assert tiny_sources(tmp_path, answer=2).key("g++", "-O3") in keys
