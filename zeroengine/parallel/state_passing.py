"""Linear attention over a sequence spread over ranks: only the state at the borders crosses ranks.

A recurrence S_t = A_t S_{t-1} + B_t is a composition of affine maps, so a rank's tokens are one map (A, B) whatever their
number. Ranks exchange these (an all-gather of N maps), each composes those before it into its initial state, and runs its
tokens from there. The volume does not depend on the length of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroengine.comm.protocol import Communicator
from zeroengine.parallel.tensor_ops import GatherReduce


def pass_state(transition: Tensor, state: Tensor, comm: Communicator, subject: str = "state") -> Tensor:
    """The state before this rank's first token.

    `transition` [..., K, K] (or [..., 1, 1] for a scalar decay) and `state` [..., K, V]: this rank's tokens turn a state S
    into transition @ S + state. Ranks hold contiguous pieces in order of rank. Differentiable. Collective, also in backward.
    """
    if comm.size == 1:
        return torch.zeros_like(state)
    cut = transition.numel()
    mine = torch.cat([transition.reshape(-1), state.reshape(-1)])
    maps: Tensor = GatherReduce.apply(mine[None], comm, 0, subject)
    before = maps.sum() * 0 + torch.zeros_like(state)  # every rank takes part in the backward
    for r in range(comm.rank):
        a, b = maps[r, :cut].view(transition.shape), maps[r, cut:].view(state.shape)
        before = (a * before if a.shape[-1] == 1 else a @ before) + b
    return before


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, comm: Communicator, starts: Tensor | None = None, chunk: int = 64
) -> Tensor:
    """o_t = S_t^T q_t with S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T (Mamba-2's form: Dao and Gu 2024), in chunks.

    q, k [B, H, local, K], v [B, H, local, V], log_decay [B, H, local] <= 0; `starts` [B, local] bool marks first tokens of
    documents, where the state begins at zero. Contiguous pieces in order of rank. Returns [B, H, local, V] in v's type;
    sums are made in fp32 (fp64). Collective, also in backward.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    q_, k_, v_, decay = (t.to(wide) for t in (q, k, v, log_decay))
    fresh = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if starts is None else starts
    parts = [
        _Chunk(q_[:, :, s], k_[:, :, s], v_[:, :, s], decay[:, :, s], fresh[:, s])
        for s in (slice(at, at + chunk) for at in range(0, q.shape[2], chunk))
    ]
    passed = torch.ones(*q.shape[:2], 1, 1, dtype=wide, device=q.device)
    state = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=wide, device=q.device)
    for part in parts:
        state, passed = part.carry * state + part.added, part.carry * passed
    state = pass_state(passed, state, comm, "gated linear attention")
    outs = []
    for part in parts:
        outs.append(part.output(state))
        state = part.carry * state + part.added
    return torch.cat(outs, 2).to(v.dtype)


class _Chunk:
    """Some tokens as one affine map of the state: S -> carry * S + added."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, fresh: Tensor) -> None:
        since = decay.cumsum(-1)
        document = fresh.long().cumsum(-1)
        n = q.shape[2]
        same = (document[:, :, None] == document[:, None, :]) & torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        gaps = (since[..., :, None] - since[..., None, :]).masked_fill(~same[:, None], -torch.inf)
        self._inside = (q @ k.mT * gaps.exp()) @ v
        self._from_before = q * (since.exp() * (document == 0)[:, None])[..., None]
        last = document[:, -1:] == document
        weight = (since[..., -1:] - since).masked_fill(~last[:, None], -torch.inf).exp()
        self.added = (k * weight[..., None]).mT @ v
        self.carry = (since[..., -1].exp() * (document[:, -1] == 0)[:, None])[..., None, None]

    def output(self, state: Tensor) -> Tensor:
        return self._inside + self._from_before @ state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, comm: Communicator, starts: Tensor | None = None
) -> Tensor:
    """o_t = S_t^T q_t with S_t = a_t (1 - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, a = exp(log_decay)
    (gated delta rule: Yang et al. 2024). Token by token: the reference for faster kernels.

    Shapes as in `gated_linear_attention`, beta [B, H, local]; keys should have norm 1. The map of a rank's tokens has a full
    [K, K] transition. Collective, also in backward.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    q_, k_, v_, b, a = (t.to(wide) for t in (q, k, v, beta, log_decay.exp()))
    if starts is not None:
        a = a.masked_fill(starts[:, None], 0.0)
    eye = torch.eye(q.shape[3], dtype=wide, device=q.device).expand(*q.shape[:2], -1, -1)

    def step(state: Tensor, t: int, writes: bool) -> Tensor:
        key = k_[:, :, t, :, None]
        scale = b[:, :, t, None, None]
        kept = a[:, :, t, None, None] * (state - scale * key @ (key.mT @ state))
        return kept + scale * key @ v_[:, :, t, None, :] if writes else kept

    transition, state = eye, torch.zeros(*q.shape[:3][:2], q.shape[3], v.shape[3], dtype=wide, device=q.device)
    if comm.size > 1:
        for t in range(q.shape[2]):
            transition, state = step(transition, t, False), step(state, t, True)
    state = pass_state(transition, state, comm, "gated delta rule")
    outs = []
    for t in range(q.shape[2]):
        state = step(state, t, True)
        outs.append(q_[:, :, t, None, :] @ state)
    return torch.cat(outs, 2).to(v.dtype)


class GatedLinearAttention(nn.Module):
    """Reference layer: [B, local, width] -> the same, over the sequence that the ranks of `comm` share in contiguous pieces."""

    def __init__(self, width: int, heads: int, comm: Communicator) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.heads = heads
        self.comm = comm
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.decay = nn.Linear(width, heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """`starts` [B, local] bool: first tokens of documents."""
        b, s, width = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        decay = nn.functional.logsigmoid(self.decay(x)).transpose(1, 2)
        out = gated_linear_attention(q, k * k.shape[-1] ** -0.5, v, decay, self.comm, starts)
        return self.out(out.transpose(1, 2).reshape(b, s, width))
