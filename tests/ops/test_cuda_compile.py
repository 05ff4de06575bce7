"""CUDA sources compile for the GPUs that they are written for. What they compute is checked in tests/gpu."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from zeroengine.ops.compile import compile_library
from zeroengine.ops.sources import Sources, csrc
from zeroengine.ops.toolchain import Compiler, find_nvcc, nvcc_flags

NVCC = find_nvcc()


@pytest.mark.skipif(isinstance(NVCC, str), reason=str(NVCC))
def test_it_compiles_with_wide_accesses_and_no_contraction(tmp_path: Path) -> None:
    folder = csrc()
    assert folder is not None and isinstance(NVCC, Compiler)
    path = tmp_path / "cuda.so"
    compile_library(Sources(folder, "update_cuda"), NVCC, nvcc_flags("sm_90"), path)
    dll = ctypes.CDLL(str(path))
    assert dll.ze_update_cuda and dll.ze_cast_cuda and dll.ze_cuda_error

    ptx = tmp_path / "update.ptx"
    flags = [f for f in nvcc_flags("sm_90") if f != "-shared"]
    unit = folder / "update_cuda" / "update.cu"
    command = [*NVCC.command, *flags, "-I", str(folder), "-ptx", str(unit), "-o", str(ptx)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    text = ptx.read_text()
    assert len(re.findall(r"\.entry ", text)) == 10  # nine rules and the cast
    assert re.search(r"ld\.global\.v4", text) and re.search(r"st\.global\.v4", text)
    # Each operation rounds once: no contraction, and exact division and square root, each one instruction of PTX.
    assert not re.search(r"\bfma\.", text)
    assert re.search(r"div\.rn\.f32", text) and re.search(r"sqrt\.rn\.f32", text)
