"""`zerorun report RUN_DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zeroengine.arguments import Parser
from zeroengine.errors import ConfigError
from zeroengine.monitor.document import assemble
from zeroengine.monitor.record import read_run


def run(argv: Sequence[str]) -> int:
    """Prints a run's report, and writes `report.json` and `report.html` beside its records unless told where."""
    parser = Parser("zerorun report", description="Predicted beside measured: memory, traffic and time of a run.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that monitor.run_dir named")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes (default RUN_DIR/report.html)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (default RUN_DIR/report.json)")
    args = parser.parse_args(argv)
    facts, records = read_run(args.run_dir)
    report = assemble(facts, records)
    page, figures = args.html or args.run_dir / "report.html", args.json or args.run_dir / "report.json"
    for path, text in ((page, report.html()), (figures, report.json() + "\n")):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; give files in a folder that is there (--html, --json)"
            ) from error
    sys.stdout.write(f"{report.text()}\n{page}\n{figures}\n")
    return 0
