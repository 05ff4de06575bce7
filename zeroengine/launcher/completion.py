"""`zerorun completion bash|zsh|fish`: prints what makes the shell complete commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher.cli import COMMANDS
from zeroengine.launcher.options import build_parser

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_zerorun() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    case $before in
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "{options}" -- "$word"))
    elif [[ $COMP_CWORD == 1 ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word") $(compgen -f -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _zerorun zerorun
"""


def _actions() -> list[argparse.Action]:
    return [action for action in build_parser()._actions if action.option_strings]


def _names(action: argparse.Action) -> list[str]:
    """Spellings with dashes; the ones with underscores are for old scripts."""
    return [name for name in action.option_strings if "_" not in name]


def _bash(commands: Sequence[str]) -> str:
    cases = []
    for action in _actions():
        if action.choices:
            values = " ".join(map(str, action.choices))
            cases.append(f'        {"|".join(_names(action))}) COMPREPLY=($(compgen -W "{values}" -- "$word")); return;;')
        elif action.nargs != 0:
            cases.append(f'        {"|".join(_names(action))}) COMPREPLY=($(compgen -f -- "$word")); return;;')
    options = " ".join(name for action in _actions() for name in _names(action))
    return _BASH.format(cases="\n".join(cases), options=options, commands=" ".join(commands))


def _zsh(commands: Sequence[str]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands)


def _fish(commands: Sequence[str]) -> str:
    lines = [f"complete -c zerorun -n __fish_use_subcommand -a '{' '.join(commands)}'"]
    for action in _actions():
        summary = (action.help or "").replace("\\", "").replace("'", "\\'").replace("%%", "%")
        for name in _names(action):
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            value = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else " -r" if action.nargs != 0 else ""
            lines.append(f"complete -c zerorun {kind}{value} -d '{summary}'")
    return "\n".join(lines) + "\n"


def run(argv: Sequence[str]) -> int:
    if list(argv[1:]) or not argv or argv[0] not in SHELLS:
        raise ZeroEngineError(f"usage: zerorun completion {'|'.join(SHELLS)}, as in: source <(zerorun completion bash)")
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[argv[0]]
    sys.stdout.write(write(list(COMMANDS)))
    return 0
