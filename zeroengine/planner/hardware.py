"""What a machine does in a second: numbers of data sheets, or measured on the present machine and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from zeroengine.errors import ConfigError
from zeroengine.wording import bytes_of


@dataclass(frozen=True)
class Hardware:
    """Of one rank. Rates in bytes or FLOPs a second, times in seconds, sizes in bytes.

    `flops`: of matrix products in 16 bits, `flops32` in fp32, both as reached. `memory_rate`: of the memory that computes, `host_rate`:
    of the host's, for updates there. `inside`, `between`: what a rank sends to peers on its node and on others; `latency_*`:
    of one collective. `link_rate`: between device and host. `overlap`: share of backward in which gradients travel. `reserved`:
    memory of context and libraries.
    """

    name: str
    device: str
    memory: float
    flops: float
    flops32: float
    memory_rate: float
    host_rate: float
    inside: float
    between: float
    latency_inside: float
    latency_between: float
    link_rate: float
    disk_rate: float
    operation: float
    per_node: int = 8
    overlap: float = 0.8
    reserved: float = 1e9
    source: str = ""

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


def _gpu(name: str, memory: float, peak: float, peak32: float, rate: float, inside: float, between: float, source: str) -> Hardware:
    """`peak`: dense 16-bit FLOPs of the data sheet. Half of it is what large models reach (Narayanan et al. 2021: 44 to 52 %), of
    links four fifths."""
    return Hardware(
        name, "cuda", memory, 0.5 * peak, 0.5 * peak32, 0.8 * rate, 25e9, 0.8 * inside, 0.8 * between, 1e-5, 2e-5, 20e9, 0.6e9, 5e-6,
        source=source,
    )  # fmt: skip


PRESETS: Mapping[str, Hardware] = MappingProxyType(
    {
        "v100-32g": _gpu(
            "v100-32g", 32e9, 125e12, 15.7e12, 900e9, 150e9, 12.5e9,
            "NVIDIA V100 data sheet (2020): SXM2 125 TFLOPS, 900 GB/s, NVLink 300 GB/s both ways; one 100 Gb/s port a GPU",
        ),
        "a100-40g": _gpu(
            "a100-40g", 40e9, 312e12, 19.5e12, 1555e9, 300e9, 25e9,
            "NVIDIA A100 data sheet (2021): 312 TFLOPS bf16, 1555 GB/s, NVLink 600 GB/s both ways; one 200 Gb/s port a GPU",
        ),
        "a100-80g": _gpu(
            "a100-80g", 80e9, 312e12, 19.5e12, 2039e9, 300e9, 25e9,
            "NVIDIA A100 data sheet (2021): 312 TFLOPS bf16, 2039 GB/s, NVLink 600 GB/s both ways; one 200 Gb/s port a GPU",
        ),
        "h100-80g": _gpu(
            "h100-80g", 80e9, 989e12, 67e12, 3350e9, 450e9, 50e9,
            "NVIDIA H100 data sheet (2023): SXM 989 TFLOPS bf16 dense, 3.35 TB/s, NVLink 900 GB/s both ways; one 400 Gb/s port a GPU",
        ),
        "h200-141g": _gpu(
            "h200-141g", 141e9, 989e12, 67e12, 4800e9, 450e9, 50e9,
            "NVIDIA H200 data sheet (2024): 989 TFLOPS bf16 dense, 4.8 TB/s, NVLink 900 GB/s both ways; one 400 Gb/s port a GPU",
        ),
    }
)  # fmt: skip


def find_hardware(text: str) -> Hardware:
    """A preset's name, or a JSON file that `zerorun plan --measure` wrote. Raises `ConfigError`."""
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"--hardware {text}: neither a file nor one of {', '.join(PRESETS)}")
    try:
        return Hardware(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--hardware {text}: {error}; write it with `zerorun plan --measure`") from error


def parse_memory(text: str) -> float:
    """ "80GB", "16GiB", "512MiB" or a number, in bytes. Raises `ConfigError`."""
    size = bytes_of(text)
    if size is None:
        raise ConfigError(f"{text!r} is no size of memory; write 80GB or 16GiB")
    return float(size)
