from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.jobs import Launches


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    started = Launches(tmp_path)
    yield started
    for job in started.jobs:
        job.kill_all()
        job.process.wait(timeout=10)
