"""Attention on ranks' shares of the tokens of rows."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import AttentionKind, Packing, pack_lengths
from trainhouse.workers.ops.attention_kind import Sinks
from trainhouse.workers.parallel.sequence import ShardedPacking
from trainhouse.workers.parallel.token_shard import TokenShard
from trainhouse.workers.shapes.sequence_split import SequenceSplit

from .probe_worker import ProbeWorker

HEAD_DIM = 8


@dataclass(frozen=True)
class Attending:
    """lengths: of the packed sequences."""

    lengths: tuple[int, ...]
    heads: int = 3
    kv_heads: int = 1
    window: int | None = None
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False
    cap: float | None = None

    def kind(self, sinks: Tensor | None) -> AttentionKind:
        of_heads = Sinks(sinks) if sinks is not None else None
        return AttentionKind(0, HEAD_DIM**-0.5, self.window, of_heads, cap=self.cap)

    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 2, self.heads) if self.has_sinks else None

    @property
    def packing(self) -> Packing:
        return Packing(pack_lengths(list(self.lengths)))

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the result: [tokens, heads, HEAD_DIM]."""
        generator = torch.Generator().manual_seed(len(self.lengths))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(sum(self.lengths), each, HEAD_DIM, generator=generator).to(self.dtype) for each in heads]


def attended(rank: ProbeWorker, case: Attending) -> list[np.ndarray]:
    """Returns, for all tokens, the output without and with gradients, and the gradients of query, key and value, and of
    any sinks."""
    sp = rank.mesh.along("sp")
    split = SequenceSplit.of(sp.size, case.heads, case.kv_heads)
    share = TokenShard(sum(case.lengths), rank.mesh, ring=split.ring)
    packing = ShardedPacking.of(case.packing, share, sp, split)
    *leaves, grad = (share.of_tokens(x).contiguous() for x in case.tensors())
    sinks = case.sinks()
    with torch.no_grad():
        plain = packing.attend(*leaves, case.kind(sinks))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = packing.attend(*leaves, case.kind(sinks))
    if sinks is not None:
        # After the forward pass, as with sharded layers.
        sinks.grad = torch.zeros_like(sinks)
    found = [plain, out.detach(), *torch.autograd.grad(out, leaves, grad)]
    of_sinks = [sp.all_reduce(sinks.grad).numpy()] if sinks is not None and sinks.grad is not None else []
    return [share.joined(each).float().numpy() for each in found] + of_sinks
