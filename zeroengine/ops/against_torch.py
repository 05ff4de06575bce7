"""Flags for libraries that include headers of the installed torch. Only those need torch to be built."""

from __future__ import annotations

from pathlib import Path

_HEADER = Path("c10", "core", "CPUAllocator.h")


def torch_flags() -> tuple[str, ...] | str:
    """What such a library is compiled and linked with, besides the flags of all; why it cannot be, in one line.

    They hold torch's version, and so does the key of a build: what is loaded into another torch is another library.
    """
    import torch

    folder = Path(torch.__file__).parent
    if not (folder / "include" / _HEADER).is_file():
        return f"torch {torch.__version__} has no header {_HEADER} in {folder / 'include'}"
    return (
        "-std=c++20",  # as torch's own extensions
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DZE_TORCH={torch.__version__}.{torch.version.git_version}",
        f"-isystem{folder / 'include'}",
        f"-L{folder / 'lib'}",
        "-Wl,--no-as-needed",  # it stands before what needs it
        "-lc10",
    )
