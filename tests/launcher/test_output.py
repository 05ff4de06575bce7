"""What ranks write, and where it arrives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launcher.jobs import Launches
from zeroengine.launcher.console import Screen, Stream

pytestmark = pytest.mark.timeout(120)

BOTH = """
    import os, sys, time
    print("out of", os.environ["RANK"], flush=True)
    print("err of", os.environ["RANK"], file=sys.stderr)
    if os.environ["RANK"] == "0":
        open("said", "w").close()
    else:
        while not os.path.exists("said"):
            time.sleep(0.01)
        raise ValueError("boom")
"""


def test_lines_carry_their_rank_and_keep_their_stream(launches: Launches) -> None:
    job = launches.run("--nproc", "2", launches.script(BOTH))
    assert sorted(job.out.splitlines()) == ["[rank0] out of 0", "[rank1] out of 1"]
    assert {"[rank0] err of 0", "[rank1] err of 1"} <= set(job.err.splitlines())


def test_log_dir_has_a_file_for_each_stream_and_the_error_too(launches: Launches) -> None:
    logs = launches.folder / "deep" / "logs"
    job = launches.run("--nproc", "2", "--log-dir", str(logs), launches.script(BOTH))
    assert job.process.returncode == 1
    assert job.out == "" and "err of" not in job.err and "rank 1 failed first" in job.err
    assert sorted(p.name for p in logs.iterdir()) == ["rank0.err", "rank0.out", "rank1.err", "rank1.out"]
    assert (logs / "rank0.out").read_text() == "out of 0\n" and (logs / "rank0.err").read_text() == "err of 0\n"
    text = (logs / "rank1.err").read_text()
    assert text.startswith("err of 1\n") and text.count("ValueError: boom") == 1


def test_tee_and_show(launches: Launches) -> None:
    script = launches.script("import os; print('out of', os.environ['RANK'])")
    job = launches.run("--nproc", "2", "--log-dir", "logs", "--tee", "--show", "1", "--no-ranks-prefix", script)
    assert job.process.returncode == 0
    assert job.out == "out of 1\n"
    assert (launches.folder / "logs" / "rank0.out").read_text() == "out of 0\n"


def test_much_output_arrives_whole(launches: Launches) -> None:
    script = "import os\nfor i in range(20000): print(os.environ['RANK'], i, 'x' * 60)"
    job = launches.run("--nproc", "2", launches.script(script))
    for rank in "01":
        lines = [line for line in job.out.splitlines() if line.startswith(f"[rank{rank}] {rank} ")]
        assert [int(line.split()[2]) for line in lines] == list(range(20000))


def test_a_reader_that_goes_away_ends_the_job(launches: Launches) -> None:
    script = "import time\nwhile True: print('x'); time.sleep(0.01)"
    job = launches.start("--nproc", "1", launches.script(script))
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(15) == 141
    assert not job.alive()


def shown(*parts: tuple[int, bytes]) -> bytes:
    """What two streams "a" and "b" put on one screen; each part is fed, and what it leaves unfinished is shown."""
    read, write = os.pipe()
    screen = Screen(write)
    streams = [Stream(screen, prefix, None) for prefix in ("a ", "b ")]
    for which, data in parts:
        streams[which].feed(data)
        streams[which].flush()
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([(0, b"x\ny\n")], b"a x\na y\n"),
        ([(0, b"x"), (0, b"y\n")], b"a xy\n"),
        ([(0, b"x"), (1, b"y\n"), (0, b"z\n")], b"a x\nb y\na z\n"),
        ([(0, b"\r1%"), (0, b"\r2%"), (0, b"\r3%\n")], b"\ra 1%\ra 2%\ra 3%\n"),
        ([(0, b"\r1%\r2%\r3%")], b"\ra 3%"),
        ([(0, b"\r1%"), (1, b"y\n"), (0, b"\r2%")], b"\ra 1%\nb y\n\ra 2%"),
        ([(0, b"x\r\n")], b"a x\r\n"),
    ],
)
def test_lines_stay_whole_on_the_screen(parts: list[tuple[int, bytes]], text: bytes) -> None:
    assert shown(*parts) == text


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    read, write = os.pipe()
    stream = Stream(Screen(write), "", tmp_path / "log")
    stream.feed(b"half")
    assert stream.waiting and (tmp_path / "log").read_bytes() == b"half"
    stream.feed(b" a line\n")
    assert not stream.waiting and os.read(read, 100) == b"half a line\n"
    os.close(read)
    os.close(write)
