"""Which variables reach the ranks on other hosts: some by rule, others by the list in `.zero_env`, others by `--env`.

Values travel over the launcher's connection to a host, never on a command line, so they may hold any characters and do
not show in process lists.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zeroengine.errors import ZeroEngineError

FILE = ".zero_env"
# By rule: what says how libraries of the job behave and where they find things. What names a device or an address of
# one host stays there.
RULE = (
    "PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LANG", "LC_*", "TZ", "OMP_*", "MKL_*", "OPENBLAS_*",
    "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "NVIDIA_*", "NCCL_*", "RCCL_*", "HIP_*", "ROCM_*",
    "HSA_*", "GLOO_*", "UCX_*", "FI_*", "TP_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "HUGGING_FACE_*", "WANDB_*", "MLFLOW_*",
    "ZE_*",
)  # fmt: skip
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
STAYS = (
    *DEVICES, "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_*", "*_SOCKET_IFNAME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT",
)  # fmt: skip
# What an MPI or Slurm step says of the one process that it started on a host; ranks are other processes.
OF_STEP = ("OMPI_COMM_WORLD_*", "OMPI_UNIVERSE_SIZE", "PMIX_*", "PMI_*", "PMI2_*", "MPI_LOCAL*", "ZERORUN_*")
_NAME = re.compile(r"[^=\s#][^=\s]*")


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks may see of the environment of the process that starts them."""
    return {name: value for name, value in environ.items() if not matches(name, OF_STEP)}


def by_rule(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job needs on every host."""
    return {name: value for name, value in environ.items() if matches(name, RULE) and not matches(name, STAYS)}


def parse_list(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`.zero_env`: `NAME=VALUE`, where everything after the first `=` is the value as it stands, up to the end of the
    line; `NAME`, with the value that it has in `environ` (any characters, newlines too); `PATTERN*`, all that match.
    `#` at the start of a line makes a comment. Raises `ZeroEngineError` with file and line."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.lstrip().partition("=")
        if equals:
            if not _NAME.fullmatch(name) or "*" in name:
                raise ZeroEngineError(f"{path}:{number}: {name!r} is no name of a variable; a line is NAME=VALUE or NAME")
            found[name] = value
            continue
        name = name.rstrip()
        if not _NAME.fullmatch(name):
            raise ZeroEngineError(f"{path}:{number}: {name!r} is no name of a variable; a line is NAME=VALUE or NAME")
        if "*" not in name and name not in environ:
            raise ZeroEngineError(f"{path}:{number}: {name} is not set here; give it a value with {name}=VALUE, or remove it")
        found.update({n: v for n, v in environ.items() if fnmatch.fnmatchcase(n, name)})
    return found


def listed(folders: Sequence[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """What the `.zero_env` of the given folders list; a later folder overrides an earlier one."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(folders):
        path = folder / FILE
        try:
            text = path.read_bytes().decode("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ZeroEngineError(f"{path} cannot be read: {error.strerror}") from None
        found.update(parse_list(text, str(path), environ))
    return found


def asked(settings: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What `--env NAME=VALUE`, `--env NAME` and `--env 'PATTERN*'` give, the later over the earlier."""
    env: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name:
            raise ZeroEngineError(f"--env {setting!r}: NAME, NAME=VALUE or PATTERN*")
        if equals:
            env[name] = value
        elif "*" in name:
            env.update({n: v for n, v in environ.items() if fnmatch.fnmatchcase(n, name)})
        elif name in environ:
            env[name] = environ[name]
        else:
            raise ZeroEngineError(f"--env {name}: it is not set here; give it a value with --env {name}=VALUE")
    return env
