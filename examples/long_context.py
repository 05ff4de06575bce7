"""Trains a small Llama on whole source files of Python's own standard library, each sequence shared by all ranks.

    zerorun --nproc 2 examples/long_context.py --tokens 4096
    zerorun --nproc 2 examples/long_context.py --tokens 4096 --attention ulysses

A token is a byte. No line of the model knows that a rank holds a part of the tokens only: `mesh.cp` in the configuration
cuts the batches, exchanges the attention and averages the loss. Every rank prints the largest memory that its training took.

`--memory-limit 100` gives every rank 100 MiB for training, beside libraries and the model (Linux). What does not fit ends the run
with an error that says so.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zeroengine

BYTES = 256  # the vocabulary
STATUS = Path("/proc/self/status")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--attention", choices=("ring", "ulysses"), default="ring", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--memory-limit", type=int, metavar="MIB", help="of every rank's training (default: none)")
    args = parser.parse_args()
    for name in ("tokens", "steps", "layers", "memory_limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.memory_limit is not None and not STATUS.exists():
        parser.error(f"--memory-limit needs {STATUS}, which this system does not have")
    if args.width < 32 or args.width % 32:
        parser.error(f"--width {args.width}: must be a multiple of 32, the width of a head")
    return args


def long_sources(tokens: int, wanted: int) -> Tensor:
    """[wanted, tokens] bytes: the beginnings of the longest source files, long enough ones over again if there are few."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in folder.rglob("*.py") if "site-packages" not in p.parts]
    files.sort(key=lambda p: (-p.stat().st_size, str(p)))
    found = [torch.frombuffer(bytearray(p.read_bytes()[:tokens]), dtype=torch.uint8) for p in files[:wanted]]
    whole = [t for t in found if t.numel() == tokens]
    if not whole:
        raise SystemExit(f"--tokens {tokens}: no source file in {folder} is that long; the longest has {found[0].numel()}")
    return torch.stack([whole[i % len(whole)] for i in range(wanted)]).long()


def limit_memory(mib: int) -> None:
    """From now on this process may take `mib` MiB more than it has; what does not fit is an error of torch's allocator."""
    used = next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + mib * 2**20, hard))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def settings(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "mesh": {"cp": ranks},
        "sequence_parallel": {"attention": args.attention},
        "steps_per_print": None,
    }


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shape = LlamaConfig(
        vocab_size=BYTES, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32, num_key_value_heads=1, max_position_embeddings=args.tokens,
    )  # fmt: skip
    engine, *_ = zeroengine.initialize(model=LlamaForCausalLM(shape), config=settings(args, ranks))
    texts = long_sources(args.tokens, args.steps)
    before = peak_mib()
    if args.memory_limit is not None:
        limit_memory(args.memory_limit)
    try:
        train(engine, texts)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise SystemExit(
            f"rank {engine.mesh.rank}: {args.tokens} tokens on {ranks} rank(s) do not fit into {args.memory_limit} MiB; use more ranks"
        ) from None
    mine = -(-args.tokens // ranks)
    sys.stdout.write(f"rank {engine.mesh.rank}: {mine} of {args.tokens} tokens, training took {peak_mib() - before:.0f} MiB\n")
    sys.stdout.flush()
    engine.destroy()


def train(engine: zeroengine.ZeroEngine, texts: Tensor) -> None:
    """One step for each text. Rank 0 prints the loss, which is that of all tokens."""
    for step, text in enumerate(texts):
        batch = text[None].to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if engine.mesh.rank == 0:
            sys.stdout.write(f"step {step + 1}: loss {float(loss.detach()):.4f}\n")


if __name__ == "__main__":
    main()
