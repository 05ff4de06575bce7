"""Trains a small byte-level GPT, written in plain PyTorch, on the source code of Python's own standard library.

    zerorun --nproc 2 examples/train_gpt.py

For whoever has a PyTorch script already: everything but the three lines marked (1), (2) and (3) is what any such
script has. Batch size, precision, optimizer, schedule and ZeRO stage come from the JSON file.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import zeroengine

BYTES = 256  # the vocabulary
HEAD_WIDTH = 64


class Block(nn.Module):
    """Pre-norm transformer block with causal attention: [batch, tokens, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class GPT(nn.Module):
    """Logits over the next byte, or their loss when targets are given. The head shares the embedding's weight."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of `text` (uint8, [bytes]) and the same windows one byte later, int64 [length]."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def library_text(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).parent / "configs" / "gpt.json", help="DeepSpeed-style JSON file")
    add("--steps", type=int, default=200, help="optimizer steps (default %(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    add("--width", type=int, default=256, help="model width (default %(default)s)")
    add("--length", type=int, default=128, help="context in bytes (default %(default)s)")
    add("--bytes", type=int, default=4_000_000, help="text to train on (default %(default)s)")
    args = parser.parse_args()
    if min(args.steps, args.layers, args.length) < 1:
        parser.error("--steps, --layers and --length must be at least 1")
    if args.width < HEAD_WIDTH or args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, not {args.width}")
    if args.bytes < 10 * (args.length + 1):
        parser.error(f"--bytes {args.bytes}: a tenth is held out and must hold --length {args.length} + 1 bytes")
    return args


@torch.no_grad()
def held_out_loss(engine: zeroengine.ZeroEngine, windows: Windows, batches: int = 4, size: int = 8) -> float:
    """Mean loss over the first windows, the same on every rank."""
    engine.eval()
    total = 0.0
    for start in range(0, batches * size, size):
        pairs = [windows[index % len(windows)] for index in range(start, start + size)]
        tokens, targets = (torch.stack(side).to(engine.device) for side in zip(*pairs, strict=True))
        total += engine(tokens, targets).item()
    engine.train()
    return total / batches


def main() -> None:
    args = parse_args()
    talks = os.environ.get("RANK", "0") == "0"
    torch.manual_seed(0)
    text = library_text(args.bytes)
    cut = len(text) * 9 // 10
    train, held_out = Windows(text[:cut], args.length), Windows(text[cut:], args.length)
    model = GPT(args.layers, args.width, args.length)

    engine, _, loader, _ = zeroengine.initialize(model=model, config=args.config, training_data=train)  # (1)

    before, start = held_out_loss(engine, held_out), time.monotonic()
    while engine.global_steps < args.steps:
        for tokens, targets in loader:
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            updates = engine.is_gradient_accumulation_boundary()  # or else the step only accumulates
            engine.backward(loss)  # (2) instead of loss.backward()
            engine.step()  # (3) instead of optimizer.step(), scheduler.step() and optimizer.zero_grad()
            if talks and updates and engine.global_steps % 20 == 0:
                sys.stdout.write(f"step {engine.global_steps}: loss {loss.item():.3f}, lr {engine.get_lr()[0]:.1e}\n")
            if engine.global_steps >= args.steps:
                break
    after, seconds = held_out_loss(engine, held_out), time.monotonic() - start
    if talks:
        sys.stdout.write(f"held-out loss {before:.3f} before, {after:.3f} after {args.steps} steps in {seconds:.0f} s\n")
    engine.destroy()


if __name__ == "__main__":
    main()
