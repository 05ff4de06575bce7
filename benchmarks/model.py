"""The workload: a plain GPT, and a language simple enough that its loss falls within a few steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.settings import Settings

_SYMBOLS = 64


class Block(nn.Module):
    """Pre-norm transformer block: [B, T, H] -> [B, T, H]."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(hidden, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        inner: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + inner


class GPT(nn.Module):
    """Decoder with learned positions and an output head tied to the token embedding."""

    def __init__(self, settings: Settings):
        super().__init__()
        hidden = settings.hidden
        self.tokens = nn.Embedding(settings.vocab, hidden)
        self.positions = nn.Embedding(settings.sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, settings.vocab, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy (scalar) of `targets` [B, T] given `tokens` [B, T], both int64."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss


def build_model(settings: Settings) -> GPT:
    """The same weights in every system and on every rank."""
    torch.manual_seed(settings.seed)
    return GPT(settings)


def count_parameters(model: nn.Module) -> int:
    """Tied parameters count once."""
    return sum(p.numel() for p in model.parameters())


def step_batches(settings: Settings, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one step on one rank: (tokens, targets), each int64 [micro_batch, sequence].

    A few symbols of the vocabulary, each an affine function of the one before it plus a little noise: that much is
    learned within a few steps.
    """
    symbols = min(settings.vocab, _SYMBOLS)
    generator = torch.Generator().manual_seed(settings.seed + 7919 * step + rank)
    batches = []
    for _ in range(settings.accumulation):
        noise = torch.randint(0, 3, (settings.sequence, settings.micro_batch), generator=generator)
        column = torch.randint(0, symbols, (settings.micro_batch,), generator=generator)
        columns = [column]
        for t in range(settings.sequence):
            columns.append((columns[-1] * 5 + 7 + noise[t]) % symbols)
        text = torch.stack(columns, dim=1)
        batches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return batches
