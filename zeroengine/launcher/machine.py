"""What this host offers to ranks: cores and GPUs. No torch: the launcher asks before it starts anything."""

from __future__ import annotations

import glob
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher.environment import DEVICES

_GPU_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/davinci[0-9]*")
_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"


def physical_cores() -> int:
    """Cores that this process may use; the threads of one core count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def gpu_count() -> int:
    """GPUs that torch can use here. torch is asked, in a process of its own, only where a device file exists."""
    if not any(glob.glob(pattern) for pattern in _GPU_NODES):
        return 0
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True)
    try:
        return int(done.stdout.split()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ZeroEngineError(f"torch cannot count the GPUs of {socket.gethostname()}: {last}") from None


def device_variable(environ: Mapping[str, str]) -> str:
    """The variable that says which devices processes of this host see: one that is set, else the usual one."""
    for name in DEVICES:
        if name in environ:
            return name
    if glob.glob("/dev/davinci[0-9]*"):
        return "ASCEND_RT_VISIBLE_DEVICES"
    if glob.glob("/dev/dri/renderD*") and not glob.glob("/dev/nvidia[0-9]*") and not glob.glob("/dev/kfd"):
        return "ZE_AFFINITY_MASK"
    return "CUDA_VISIBLE_DEVICES"  # ROCm's torch reads it too


def check_port(port: int) -> None:
    """Raises an error that names the port where nobody can listen on it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ZeroEngineError(
                f"--master-port {port} cannot be used on {socket.gethostname()}: {error.strerror}. "
                "Choose another, or leave the option out: a free port is then chosen"
            ) from None
