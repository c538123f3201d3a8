"""A worker that runs attention on its share of a row's tokens, without a model."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import AttentionKind, Packing, pack_lengths
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.parallel.sequence import ShardedPacking
from trainhouse.workers.parallel.token_shard import TokenShard
from trainhouse.workers.shapes.sequence_split import SequenceSplit
from trainhouse.workers.worker.worker import Worker

HEAD_DIM = 8


@dataclass(frozen=True)
class Attending:
    """lengths: of the packed sequences."""

    lengths: tuple[int, ...]
    heads: int = 3
    kv_heads: int = 1
    window: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(0, HEAD_DIM**-0.5, self.window)

    @property
    def packing(self) -> Packing:
        return Packing(pack_lengths(list(self.lengths)))

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the result: [tokens, heads, HEAD_DIM]."""
        generator = torch.Generator().manual_seed(len(self.lengths))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(sum(self.lengths), each, HEAD_DIM, generator=generator).to(self.dtype) for each in heads]


class AttendingWorker(Worker):
    def _load(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def attend(self, case: Attending) -> list[np.ndarray]:
        """Returns, for all tokens, the output without and with gradients, and the gradients of query, key and value."""
        sp = self._mesh.along("sp")
        split = SequenceSplit.of(sp.size, case.heads, case.kv_heads)
        share = TokenShard(sum(case.lengths), self._mesh, ring=split.ring)
        packing = ShardedPacking.of(case.packing, share, sp, split)
        *leaves, grad = (share.of_tokens(x).contiguous() for x in case.tensors())
        with torch.no_grad():
            plain = packing.attend(*leaves, case.kind)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = packing.attend(*leaves, case.kind)
        found = [plain, out.detach(), *torch.autograd.grad(out, leaves, grad)]
        return [share.joined(each).float().numpy() for each in found]
