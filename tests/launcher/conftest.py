from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.jobs import Launches
from tests.launcher.netlab import Lab, lab, missing


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    started = Launches(tmp_path)
    yield started
    for job in started.jobs:
        job.kill_all()
        job.process.wait(timeout=10)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts with an sshd each."""
    if reason := missing():
        pytest.skip(reason)
    with lab(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made
