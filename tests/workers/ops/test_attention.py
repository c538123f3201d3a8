"""Packed attention and its gradients against a naive softmax per sequence, with sliding windows, sinks and caps."""

import math

import pytest
import torch
from torch import Tensor, nn
from trainhouse.workers.ops import kernels
from trainhouse.workers.ops.attention import (
    ATTENTION,
    AttendingPacking,
    Packing,
    pack_lengths,
    packed_attention,
)
from trainhouse.workers.ops.attention import attend as attend_row
from trainhouse.workers.ops.attention_kind import AttentionKind
from trainhouse.workers.ops.kernels import kernels_for
from trainhouse.workers.shapes.parts import windows
from transformers import AutoModelForCausalLM

from ...tiny import tiny_config
from ..adapted import relative_error
from ..parallel.live_bytes import LiveBytes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = [5, 5, 3, 9]
# With more tokens than a kernel processes at a time.
LONG = [1, 300, 36, 129]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CAP = 0.8
WITH_CAP = pytest.mark.parametrize("cap", [None, CAP], ids=["no cap", "cap"])
WITH_SINKS = pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])


class Layer(nn.Module):
    layer_idx = 0


def rows(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the query, key and value of a packed row."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, heads, num_tokens, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Causal attention of one sequence [1, heads, length, head_dim] -> [length, heads, head_dim]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(HEAD_DIM)
    scores = scores if cap is None else cap * (scores / cap).tanh()
    i, j = torch.meshgrid(torch.arange(query.shape[2]), torch.arange(query.shape[2]), indexing="ij")
    sees = (j <= i) & (j > i - (window or 10**9))
    scores = scores.masked_fill(~sees, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(1, -1, len(sees), 1)], dim=-1)
    return (scores.softmax(-1)[..., : len(sees)] @ value)[0].transpose(0, 1)


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    packing: Packing | AttendingPacking,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    options = {"sliding_window": window, "softcap": cap} | ({} if sinks is None else {"s_aux": sinks})
    out, _ = packed_attention(Layer(), *qkv, None, packing=packing, scaling=HEAD_DIM**-0.5, **options)
    return out[0]


def split(qkv: tuple[Tensor, Tensor, Tensor], lengths: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(lengths, dim=2) for x in qkv), strict=True))


@pytest.mark.usefixtures("either_way")
@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_attend_as_each_alone(window: int | None, sinks: Tensor | None, cap: float | None) -> None:
    qkv, packing = rows(sum(LENGTHS), seed=0), Packing(pack_lengths(LENGTHS))
    expected = torch.cat([naive(*part, window=window, sinks=sinks, cap=cap) for part in split(qkv, LENGTHS)])
    torch.testing.assert_close(attend(qkv, packing, window, sinks, cap), expected, atol=1e-5, rtol=1e-5)
    for other in (
        attend(qkv, Packing(pack_lengths([10, 3, 9])), window, sinks, cap),
        attend(qkv, packing, window, SINKS if sinks is None else sinks + 0.001, cap),
        attend(qkv, packing, window, sinks, CAP if cap is None else cap * 1.001),
    ):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 2, 20, 150])
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (20, 12), (48, 32)])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_attend_in_kernels_whatever_their_sizes(
    threads: int, size: int, value_size: int, window: int | None
) -> None:
    """Heads of queries and keys may be wider than those of values; all are parts of wider rows."""
    before, num_tokens = torch.get_num_threads(), sum(LONG)
    generator = torch.Generator().manual_seed(2)
    shapes = ((HEADS, size), (KV_HEADS, size), (KV_HEADS, value_size))
    wider = [torch.randn(num_tokens, heads + 1, each, generator=generator) for heads, each in shapes]
    weight = torch.randn(num_tokens, HEADS, value_size, generator=generator)
    query, key, value = leaves = [x[:, :-1].requires_grad_() for x in wider]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    kind, packing = AttentionKind(0, HEAD_DIM**-0.5, window), Packing(pack_lengths(LONG))
    assert kernels_for(query, key, value) is not None

    def exactly(window: int | None) -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(0, 1)[None] for x in exact)
        parts = split((q, k, v), LONG)
        out = torch.cat([naive(q, k, v, window) for q, k, v in parts])
        return out, *torch.autograd.grad((out * weight).sum(), exact)

    try:
        torch.set_num_threads(threads)
        out = attend_row(query, key, value, packing, kind)
        found = out, *torch.autograd.grad((out * weight).sum(), leaves)
        with torch.no_grad():
            assert torch.equal(attend_row(query, key, value, packing, kind), out)
    finally:
        torch.set_num_threads(before)
    for mine, wanted, other in zip(found, exactly(window), exactly((window or 290) + 1), strict=True):
        assert relative_error(mine.double(), wanted) < 1e-6 < relative_error(mine.double(), other)


def test_nonfinite_values_stay_in_their_sequence() -> None:
    def evaluated(qkv: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend((leaves[0], leaves[1], leaves[2]), Packing(pack_lengths(LENGTHS)))
        return [out, *(x[0].transpose(0, 1) for x in torch.autograd.grad(out.sum(), leaves))]

    clean = rows(sum(LENGTHS), seed=0)
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[:, :, 5] = math.nan
    for before, after in zip(evaluated(clean), evaluated((dirty[0], dirty[1], dirty[2])), strict=True):
        assert torch.equal(before[:5], after[:5]) and torch.equal(before[10:], after[10:])
        assert after[5:10].isnan().any()


@pytest.mark.usefixtures("either_way")
@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_those_of_each_sequence_alone(
    window: int | None, dtype: torch.dtype, tolerance: float, sinks: Tensor | None, cap: float | None
) -> None:
    assert_gradients(torch.device("cpu"), window, dtype, tolerance, sinks, cap)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_gradients_on_a_gpu_are_those_of_each_sequence_alone(
    window: int | None, dtype: torch.dtype, tolerance: float, sinks: Tensor | None, cap: float | None
) -> None:
    assert_gradients(torch.device("cuda"), window, dtype, tolerance, sinks, cap)


def learned(sinks: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the sinks as a parameter whose gradient is collected in float32."""
    parameter = sinks.to(device, dtype, copy=True).requires_grad_()
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.zeros_like(sinks, device=device)
    return parameter


def assert_gradients(
    device: torch.device,
    window: int | None,
    dtype: torch.dtype,
    tolerance: float,
    sinks: Tensor | None,
    cap: float | None,
) -> None:
    weight = torch.randn(sum(LENGTHS), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    exact = [x.to(dtype).double().requires_grad_() for x in rows(sum(LENGTHS), seed=7)]
    leaves = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    parameter = None if sinks is None else learned(sinks, device, dtype)
    exact_sinks = None if sinks is None else sinks.double().requires_grad_()
    parts = split((exact[0], exact[1], exact[2]), LENGTHS)
    wanted = torch.cat([naive(part[0], part[1], part[2], window, exact_sinks, cap) for part in parts])
    found = attend((leaves[0], leaves[1], leaves[2]), Packing(pack_lengths(LENGTHS)), window, parameter, cap)
    gradients = [*torch.autograd.grad((found * weight.to(found)).sum(), leaves)]
    exact_gradients = torch.autograd.grad(
        (wanted * weight.double()).sum(), exact if exact_sinks is None else [*exact, exact_sinks]
    )
    if parameter is not None and parameter.grad is not None:
        gradients.append(parameter.grad)
    for one, other in zip((found, *gradients), (wanted, *exact_gradients), strict=True):
        error = relative_error(one.double().cpu(), other)
        assert error < tolerance < relative_error(one.double().cpu() * (1 + 2 * tolerance), other)


@pytest.mark.parametrize("window", [2, 3, 16, 40, 69, 70])
@pytest.mark.parametrize("most_masked", [1, 1 << 9])
def test_windowed_attention_in_chunks_of_queries_is_exact(
    window: int, most_masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has sixteen queries or more."""
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    monkeypatch.setattr(windows, "_MAX_MASKED", most_masked)
    lengths = [70, 70, 9]
    exact = [x.double().requires_grad_() for x in rows(sum(lengths), seed=3)]
    leaves = [x.detach().float().requires_grad_() for x in exact]
    weight = torch.randn(sum(lengths), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(9))

    def result_and_gradients(out: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
        return out, *torch.autograd.grad((out * weight.to(out)).sum(), of)

    def exactly(window: int) -> tuple[Tensor, ...]:
        parts = split((exact[0], exact[1], exact[2]), lengths)
        return result_and_gradients(torch.cat([naive(q, k, v, window=window) for q, k, v in parts]), exact)

    found = result_and_gradients(
        attend((leaves[0], leaves[1], leaves[2]), Packing(pack_lengths(lengths)), window), leaves
    )
    for mine, wanted, other in zip(found, exactly(window), exactly(window + 1), strict=True):
        assert relative_error(mine.double(), wanted) < 1e-5
        assert window >= 70 or relative_error(mine.double(), other) > 1e-5


@pytest.mark.parametrize(("most_masked", "fits"), [(1 << 20, True), (1 << 40, False)])
def test_windowed_attention_allocates_no_square_mask(
    most_masked: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a mask of 16k tokens would take a gigabyte. Control: one of 4k tokens, 67 MB, is detected. Kernels need no
    mask."""
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    monkeypatch.setattr(windows, "_MAX_MASKED", most_masked)
    if not fits:
        monkeypatch.setattr(windows, "_FEWEST_QUERIES", 4096)
    num_tokens = 16384 if fits else 4096
    tensors = [x.requires_grad_() for x in rows(num_tokens, seed=5)]
    with LiveBytes() as live:
        attend((tensors[0], tensors[1], tensors[2]), Packing(pack_lengths([num_tokens])), 512).sum().backward()
    of_tensors = sum(x.nbytes for x in tensors)
    assert (live.peak < 5 * of_tensors + (10 << 20)) == fits


def test_adjacent_equal_lengths_are_one_group() -> None:
    groups = pack_lengths([5, 5, 3, 5])
    assert [(group.start, group.count, group.length) for group in groups] == [(0, 2, 5), (10, 1, 3), (13, 1, 5)]


def test_sinks_of_transformers_layers_give_its_own_numbers() -> None:
    """Compares logits and the gradients of all parameters; half of the layers have a window of four tokens."""
    config = tiny_config("gpt_oss", sliding_window=4, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    tokens = torch.randint(config.vocab_size, (sum(LENGTHS),))
    weight = torch.randn(sum(LENGTHS), config.vocab_size)
    wanted = torch.cat([model(part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)])
    wanted.backward(weight)
    exact = collected_gradients(model)
    model.set_attn_implementation(ATTENTION)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    options = {"position_ids": positions[None], "use_cache": False, "packing": Packing(pack_lengths(LENGTHS))}
    found = model(tokens[None], **options).logits[0]
    found.backward(weight)
    assert relative_error(found, wanted) < 1e-5
    for name, gradient in collected_gradients(model).items():
        assert relative_error(gradient, exact[name]) < 1e-5, name
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter += 0.01
        assert relative_error(model(tokens[None], **options).logits[0], wanted) > 1e-5


def collected_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the gradients, and sets them to zero."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    copies = {name: gradient.clone() for name, gradient in gradients.items()}
    model.zero_grad(set_to_none=False)
    return copies
