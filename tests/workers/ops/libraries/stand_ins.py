"""Python modules with the documented interfaces of the libraries, computed by plain formulas, to be installed in a
temporary folder: their kernels run only on GPUs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from trainhouse.workers.ops.libraries.convolution import CausalConv1d
from trainhouse.workers.ops.libraries.gated_delta import FlashLinearAttention
from trainhouse.workers.ops.libraries.latent_attention import FlashMla, compare_attention
from trainhouse.workers.ops.libraries.probe import Comparison, Library
from trainhouse.workers.ops.libraries.state_space import MambaSsm
from trainhouse.workers.ops.recurrences.convolution import compare_convolution
from trainhouse.workers.ops.recurrences.gated_delta import compare_gated_delta
from trainhouse.workers.ops.recurrences.state_space import compare_state_space

LENGTHS = (40, 1, 5, 17, 3)

CONVOLUTION = """
import torch
from torch.nn.functional import conv1d, pad, silu


def convolve(x, weight, bias, activation):
    out = conv1d(x.float(), weight.float().unsqueeze(1), bias.float(), groups=len(weight))
    return (silu(out) if activation == "silu" else out).to(x.dtype)


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    channels, width = weight.shape
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (1, x.shape[2])
    assert x.shape[:2] == (1, channels) and x.stride(1) == 1 and x.stride(2) > 1
    assert channels % 8 == x.stride(2) % 8 == x.stride(0) % 8 == 0
    lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    rows = [pad(row, (width - 1, 0)) for row in x.split(lengths, dim=2)]
    return torch.cat([convolve(row, weight, bias, activation) for row in rows], dim=2)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
    assert conv_state_indices.dtype == torch.int32 and conv_state.dtype == x.dtype
    window = torch.cat((conv_state[conv_state_indices], x.unsqueeze(2)), dim=2)
    conv_state[conv_state_indices] = window[:, :, 1:]
    return convolve(window, weight, bias, activation).squeeze(2)
"""

STATE_SPACE_SCAN = """
import torch


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, initial_states=None, return_final_states=False):
    groups = x.shape[2] // B.shape[2]
    b, c = (each.float().repeat_interleave(groups, dim=2) for each in (B, C))
    log_decay = (dt * A).cumsum(1)
    written = x.float() * dt.unsqueeze(3)
    before = torch.zeros(x.shape[0], *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    between = log_decay.unsqueeze(2) - log_decay.unsqueeze(1)
    earlier = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = between.masked_fill(~earlier[:, :, None], float("-inf")).exp() * torch.einsum("nlhs,nmhs->nlmh", c, b)
    out = torch.einsum("nlmh,nmhp->nlhp", weights, written)
    out = out + torch.einsum("nlhs,nhps->nlhp", c, before) * log_decay.exp().unsqueeze(3)
    to_end = (log_decay[:, -1:] - log_decay).exp()
    after = torch.einsum("nlhp,nlhs,nlh->nhps", written, b, to_end)
    after = after + before * log_decay[:, -1].exp()[:, :, None, None]
    return (out + x * D.unsqueeze(1)).to(x.dtype), after
"""

STATE_SPACE_STEP = """
def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, state_batch_indices=None):
    assert dt.shape == x.shape and A.shape == state.shape[1:] and D.shape == dt_bias.shape == x.shape[1:]
    assert A.stride()[1:] == (0, 0) and dt.stride(2) == dt_bias.stride(1) == 0
    b, c = (each.float().repeat_interleave(x.shape[1] // B.shape[1], dim=1).unsqueeze(2) for each in (B, C))
    time = (dt + dt_bias).unsqueeze(3)
    after = state[state_batch_indices] * (time * A).exp() + x.unsqueeze(3) * time * b
    state[state_batch_indices] = after
    return ((after * c).sum(3) + x * D).to(x.dtype)
"""

DELTA = """
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    assert cu_seqlens.dtype == torch.int64 and q.shape[0] == 1
    rows = zip(*(x.split(cu_seqlens.diff().tolist(), dim=1) for x in (q, k, v, g, beta)))
    states = [None] * (len(cu_seqlens) - 1) if initial_state is None else initial_state.split(1)
    runs = [
        torch_chunk_gated_delta_rule(
            *row, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        for row, state in zip(rows, states)
    ]
    outs, after = zip(*runs)
    return torch.cat(outs, dim=1), torch.cat(after)


def fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    return torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
"""

LATENT = """
import torch


class Schedule:
    def __init__(self):
        self.sizes = None


def get_mla_metadata(*arguments):
    return Schedule(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None
):
    assert num_splits is None and isinstance(tile_scheduler_metadata, Schedule)
    sizes = q.shape, cache_seqlens.tolist()
    assert tile_scheduler_metadata.sizes in (None, sizes)
    tile_scheduler_metadata.sizes = sizes
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale)


def attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale):
    assert q.shape[1:2] + q.shape[3:] == (1, 576) and head_dim_v == 512
    assert k_cache.shape[1:] == (64, 1, 576) and k_cache.is_contiguous()
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    outs = []
    for query, blocks, length in zip(q, block_table, cache_seqlens):
        keys = k_cache[blocks].flatten(0, 2)[:length].float()
        outs.append(torch.softmax(query.float() @ keys.T * softmax_scale, dim=-1) @ keys[:, :head_dim_v])
    return torch.stack(outs).to(q.dtype), None
"""

EARLY_LATENT = (
    LATENT[: LATENT.index("class Schedule")]
    + """
def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return cache_seqlens * num_heads_per_head_k, cache_seqlens


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False,
):
    assert torch.equal(tile_scheduler_metadata, cache_seqlens * q.shape[2]) and torch.equal(num_splits, cache_seqlens)
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale)


"""
    + LATENT[LATENT.index("def attend") :]
)


@dataclass(frozen=True)
class StandIn:
    """Stands in for a library. files: its modules. compare: as for `probed`. faults: what to replace in its files, by
    what, so that it computes something else."""

    library: type[Library]
    files: dict[str, str]
    compare: Callable[[Any, torch.device], Iterable[Comparison]]
    faults: tuple[tuple[str, str], ...]

    @property
    def module(self) -> str:
        return next(iter(self.files)).partition("/")[0].removesuffix(".py")

    def write(self, folder: Path, fault: tuple[str, str] | None = None) -> None:
        """Installs it in the folder. fault: one of `faults`."""
        for name, source in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source if fault is None else source.replace(*fault))


STAND_INS = {
    "convolution": StandIn(
        CausalConv1d,
        {"causal_conv1d.py": CONVOLUTION},
        partial(compare_convolution, lengths=LENGTHS),
        (
            ("seq_idx[0].unique", "seq_idx[0].mul(0).unique"),
            ("for row in rows]", "+ 0 * x.sum() for row in rows]"),
            ("(x.float()", "(x.float().detach() + 0 * x.float()"),
            ("window[:, :, 1:]", "window[:, :, :-1]"),
            ("conv_state[conv_state_indices],", "conv_state[1:],"),
        ),
    ),
    "state_space": StandIn(
        MambaSsm,
        {
            "mamba_ssm/ops/triton/ssd_combined.py": STATE_SPACE_SCAN,
            "mamba_ssm/ops/triton/selective_state_update.py": STATE_SPACE_STEP,
        },
        partial(compare_state_space, head_dim=8, state_dim=16, lengths=LENGTHS),
        (
            ("x * D.unsqueeze(1)", "0.9 * x * D.unsqueeze(1)"),
            ("after = after + before", "after = 2 * after + before"),
            ("(dt * A)", "(dt * A.detach() + 0 * A)"),
            ("state[state_batch_indices] = after", ""),
            ("+ x * D).to", ").to"),
        ),
    ),
    "delta": StandIn(
        FlashLinearAttention,
        {"fla/ops/gated_delta_rule.py": DELTA},
        partial(compare_gated_delta, dim=16, lengths=LENGTHS),
        (
            ("torch.cat(outs, dim=1)", "1.1 * torch.cat(outs, dim=1)"),
            ("for x in (q, k, v, g, beta)", "for x in (q, k, v, g.detach() + 0 * g, beta)"),
            ("v, g=g,", "v, g=0.5 * g,"),
        ),
    ),
    "latent": StandIn(
        FlashMla,
        {"flash_mla.py": LATENT},
        compare_attention,
        (("[:length]", "[: length - 1]"), ("* softmax_scale", ""), ("k_cache[blocks]", "k_cache[: len(blocks)]")),
    ),
    "early latent": StandIn(FlashMla, {"flash_mla.py": EARLY_LATENT}, compare_attention, (("[:length]", ""),)),
}
