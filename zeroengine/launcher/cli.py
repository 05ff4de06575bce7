"""`zerorun`: dispatches to a command. Without the name of one it runs a script, the default command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroengine import __version__
from zeroengine.errors import ZeroEngineError


@dataclass(frozen=True)
class Command:
    """A command of zerorun: one line on it, and the function `module:name` that takes its arguments and returns the
    exit code. It is imported only when the command is used."""

    summary: str
    function: str

    def __call__(self, argv: Sequence[str]) -> int:
        module, _, name = self.function.partition(":")
        return int(getattr(importlib.import_module(module), name)(argv))


COMMANDS: Mapping[str, Command] = {
    "env": Command("reports versions, devices, compilers, and which operation runs how", "zeroengine.ops.report:run"),
    "run": Command("starts a script on several ranks (the default)", "zeroengine.launcher.run:run"),
    "as-deepspeed": Command(
        "runs a program that starts ranks itself with zeroengine as its `deepspeed`: as-deepspeed accelerate launch ...",
        "zeroengine.launcher.as_deepspeed:run",
    ),
    "check": Command("looks at the hosts of a hostfile before a job: check --hostfile FILE", "zeroengine.launcher.preflight:run"),
    "completion": Command("prints shell completion: completion bash|zsh|fish", "zeroengine.launcher.completion:run"),
    "export": Command("writes a checkpoint's weights as model files", "zeroengine.checkpoint.commands:export"),
    "inspect": Command("says what is in a checkpoint", "zeroengine.checkpoint.commands:inspect"),
    "report": Command("shows what a run held, moved and waited for: report RUN_DIR", "zeroengine.monitor.command:run"),
    "config": Command("explains a configuration file: config check FILE", "zeroengine.config.check:main"),
    "plan": Command(
        "which layouts of a job fit, and how long a step takes: plan --model FOLDER --gpus 64", "zeroengine.planner.command:run"
    ),
    "schedule": Command("checks, simulates and draws a pipeline schedule", "zeroengine.pipeline.command:run"),
}


def help_text(commands: Mapping[str, Command]) -> str:
    from zeroengine.launcher.options import build_parser

    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())
    return f"{build_parser().format_help()}\ncommands:\n{listed}\n"


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """The exit code of the job; 2 where the command line is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        (sys.stdout if argv else sys.stderr).write(help_text(commands))
        return 0 if argv else 2
    if argv[0] == "--version":
        sys.stdout.write(f"zerorun {__version__}\n")
        return 0
    name, rest = (argv[0], argv[1:]) if argv[0] in commands else ("run", argv)
    try:
        return commands[name](rest)
    except ZeroEngineError as error:
        sys.stderr.write(f"zerorun: error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
