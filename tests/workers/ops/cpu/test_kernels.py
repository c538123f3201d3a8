"""kernels.c against torch's operations, in shapes that fill its blocks and others; and without a compiler."""

import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from trainhouse.workers.ops import kernels as kernels_module
from trainhouse.workers.ops.attention_kind import AttentionKind, Sinks
from trainhouse.workers.ops.fused import RmsNorm, Rotation, swiglu
from trainhouse.workers.ops.grouped_gemm import GroupedRows
from trainhouse.workers.ops.kernels import ExpertFactors, Kernels, PrefixGroups, kernels_for, load_kernels

TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None, "no C compiler here: install gcc or clang"
    return loaded


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Asserts that they are close, and that a small error would fail."""
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found + 3 * TOLERANCE * (1 + wanted.abs().max()), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 20), (5, 256), (300, 257)])
def test_norms(kernels: Kernels, rows: int, size: int) -> None:
    x, update, weight = random(rows, size), random(rows, size, seed=1), random(size, seed=2)
    norm = RmsNorm(weight, torch.tensor(1e-5))
    assert_near(kernels.add_rms_norm(x, None, norm)[1], naive_norm(x, weight, 1e-5))
    total, normed, _ = kernels.add_rms_norm(x, update, norm)
    assert torch.equal(total, x + update)
    assert_near(normed, naive_norm(x + update, weight, 1e-5))


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 20), (4, 128)])
@pytest.mark.parametrize("norm", [None, "shared", "of each head"])
def test_rotation_of_part_of_a_wider_row(kernels: Kernels, heads: int, size: int, norm: str | None) -> None:
    x = random(7, heads + 2, size)[:, :heads]
    angles = random(7, 1, size // 2, seed=1)
    cos, sin = torch.cat((angles, angles), -1).cos(), angles.sin()
    weight = None if norm is None else random(*([] if norm == "shared" else [heads]), size, seed=2)
    normed = x if weight is None else naive_norm(x, weight, 1e-5)
    first, second = normed.chunk(2, -1)
    wanted = torch.cat((first * angles.cos() - second * sin, second * angles.cos() + first * sin), -1)
    norms = None if weight is None else RmsNorm(weight, torch.tensor(1e-5))
    assert_near(kernels.rotate_heads(x, Rotation(cos, sin), norms)[0], wanted)


@pytest.mark.parametrize("size", [1, 20, 768])
def test_swiglu_of_parts_of_a_wider_row(kernels: Kernels, size: int) -> None:
    both = 5 * random(9, 2 * size)
    gate, up = both.split(size, dim=-1)
    assert_near(kernels.gated(gate, up, swiglu)[0], silu(gate) * up)
    assert_near(kernels.gated(gate.contiguous(), up, swiglu)[0], silu(gate) * up)
    far = torch.tensor([[-1e4, -90.0, 90.0, 1e4]])
    assert kernels.gated(far, torch.ones(1, 4), swiglu)[0].tolist() == [pytest.approx([0, 0, 90, 1e4], abs=1e-30)]


@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (5, 3), (16, 50), (64, 24), (37, 131), (270, 70)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_groups_of_rows(kernels: Kernels, inner: int, columns: int, is_transposed: bool) -> None:
    counts = torch.tensor([3, 0, 1, 9, 2])
    bounds, num_rows = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))), int(counts.sum()) + 2
    matrices = random(5, columns, inner).mT if is_transposed else random(5, inner, columns)
    x = random(num_rows, inner + 3, seed=1)[:, :inner] / inner**0.5
    groups = torch.arange(5).repeat_interleave(counts)
    wanted = torch.cat([(x[:-2, None] @ matrices[groups])[:, 0], torch.zeros(2, columns)])
    wide = random(num_rows, columns + 4, seed=2)
    before, y = wide.clone(), wide[:, 2:-2]
    kernels.grouped_matmul(y, x, matrices, bounds, adds=True)
    assert_near(y, before[:, 2:-2] + wanted)
    kernels.grouped_matmul(y, x, matrices, bounds, adds=False)
    assert_near(y, wanted)
    assert torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, -2:], before[:, -2:])


@pytest.mark.parametrize("num_rows", [1, 3, 4, 13, 32])
@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (37, 131), (270, 48)])
@pytest.mark.parametrize("by_input", [False, True])
def test_products_of_linear_layers(kernels: Kernels, num_rows: int, inner: int, columns: int, by_input: bool) -> None:
    x = random(num_rows, inner + 3)[:, :inner] / inner**0.5
    weight, bias = random(columns, inner, seed=1), random(columns, seed=2)
    weight = weight.t().contiguous().t() if by_input else weight
    wanted = (x.double() @ weight.double().t()).float()
    assert_near(kernels.linear(x, weight, None, None), wanted)
    assert_near(kernels.linear(x, weight, bias, None), wanted + bias)
    wide = random(num_rows, columns + 4, seed=3)
    before = wide.clone()
    found = kernels.linear(x, weight, bias, wide[:, 2:-2])
    assert_near(found, wanted + bias + before[:, 2:-2])
    assert torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, -2:], before[:, -2:])


@pytest.mark.parametrize(("counts", "num_rows"), [([0, 0], 0), ([], 0), ([], 3), ([0, 0], 2)])
def test_products_of_no_rows_are_zeros(counts: list[int], num_rows: int) -> None:
    groups, x = GroupedRows(torch.tensor(counts, dtype=torch.int64)), random(num_rows, 5)
    assert torch.equal(groups.matmul(x, random(len(counts), 5, 7)), torch.zeros(num_rows, 7))
    y = torch.ones(num_rows, 7)
    groups.add_matmul(y, x, random(len(counts), 5, 7))
    assert torch.equal(y, torch.ones(num_rows, 7))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_nonfinite_values_stay_in_their_row_of_a_product(is_transposed: bool) -> None:
    x = random(4, 40)
    x[1], x[2, 39] = math.nan, math.inf
    y = GroupedRows(torch.tensor([2, 0, 2])).matmul(x, random(3, 33, 40).mT if is_transposed else random(3, 40, 33))
    assert y[[0, 3]].isfinite().all() and y[1].isnan().all() and not y[2].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_matrices_of_another_dtype_than_the_rows_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        GroupedRows(torch.tensor([2, 0, 1])).matmul(random(3, 4), random(3, 4, 5).to(dtype))


@pytest.mark.parametrize("rank", [1, 8, 37])
def test_products_of_low_rank(kernels: Kernels, rank: int) -> None:
    x, a, b, wide = random(5, 40)[:, :30], random(30, rank, seed=1), random(rank, 50, seed=2), random(5, 60, seed=3)
    before, y = wide.clone(), wide[:, 4:54]
    kernels.add_low_rank(y, x, a, b)
    wanted = before[:, 4:54].double() + x.double() @ a.double() @ b.double()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
    assert (wanted - before[:, 4:54]).abs().mean() > 0.1
    assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, 54:], before[:, 54:])


@pytest.mark.parametrize("num_adapters", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_experts_of_one_rank_among_two(kernels: Kernels, num_tokens: int, num_adapters: int) -> None:
    num_own, hidden, features, width, rank = 4, 20, 24, 8, 5
    x, weights = random(num_tokens, hidden), random(num_tokens, 3, seed=1).softmax(1)
    gate_up = random(num_own, hidden, 2 * features, seed=2) / hidden**0.5
    down = random(num_own, hidden, features, seed=3).mT / features**0.5
    chosen = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:3] for i in range(num_tokens)])
    adapter, factors = torch.arange(num_tokens) % max(1, num_adapters), None
    keys = chosen
    if num_adapters:
        keys = chosen * (num_adapters + 1) + adapter[:, None]
        own = (random(num_own * num_adapters, rank, features, seed=4 + side) / rank for side in range(3))
        factors = ExpertFactors(random(num_tokens, 2 * width, seed=7), *own)

    out, between = torch.zeros(num_tokens, hidden), torch.zeros(num_tokens, width)
    for token, expert, place in ((t, int(e) - num_own, p) for t in range(num_tokens) for p, e in enumerate(chosen[t])):
        if expert < 0:
            continue
        gate, up = (x[token] @ gate_up[expert]).chunk(2)
        if factors is not None:
            group = expert * num_adapters + int(adapter[token])
            gate = gate + factors.reduced[token, :rank] @ factors.gate[group]
            up = up + factors.reduced[token, width : width + rank] @ factors.up[group]
            between[token, :rank] += weights[token, place] * (factors.down[group] @ (silu(gate) * up))
        out[token] += weights[token, place] * ((silu(gate) * up) @ down[expert])
    first = num_own * (num_adapters + 1 if num_adapters else 1)
    found = kernels.run_experts(x, keys, weights, gate_up, down, first, factors)
    assert_near(found[0], out)
    if factors is None:
        assert found[1] is None
    else:
        assert found[1] is not None
        assert_near(found[1], between)


def test_pairs_are_sorted_in_order_and_those_of_no_group_come_last(kernels: Kernels) -> None:
    keys = torch.tensor([[7, 5], [9, 4], [5, 8], [7, 6]])
    tokens, places, counts = kernels.sort_pairs(keys, first=5, num_groups=3)
    assert tokens.tolist() == [0, 2, 3, 0, 3, 1, 1, 2] and counts.tolist() == [2, 1, 2]
    assert places.tolist() == [3, 0, 5, 6, 1, 7, 4, 2]


def test_weighted_sums_of_pairs(kernels: Kernels) -> None:
    x, places, weights = random(12, 37), torch.randperm(12), random(4, 3, seed=1)
    wanted = (x[places].view(4, 3, -1) * weights.unsqueeze(-1)).sum(1)
    assert_near(kernels.combine_pairs(x, places, weights), wanted)


LENGTHS = [0, 1, 15, 16, 63, 64, 100, 130]
CAPACITY = 140
SINKS = torch.tensor([0.5, -1.0, 30.0, 0.0, -200.0, 3.0])


def attended(
    kernels: Kernels,
    size: int,
    window: int | None,
    groups: PrefixGroups,
    num_threads: int,
    slots: list[int],
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Returns the output of a step, and its query, keys, values and slots. Sequences 6 and 7 share 80 tokens."""
    heads, kv_heads, rows = 6, 2, len(LENGTHS)
    keys, values = random(rows, kv_heads, CAPACITY, size, seed=3), random(rows, kv_heads, CAPACITY, size, seed=4)
    keys[slots[7], :, :80], values[slots[7], :, :80] = keys[slots[6], :, :80], values[slots[6], :, :80]
    query, key, value = (random(rows, n, size, seed=5 + n) for n in (heads, kv_heads, kv_heads + 1))
    value = value[:, :kv_heads]
    new = query, key, value, keys, values, torch.tensor(slots), torch.tensor(LENGTHS)
    kind = AttentionKind(0, size**-0.5, window, None if sinks is None else Sinks(sinks), cap=cap)
    out = kernels.decode_attention(*new, groups, kind, num_threads)
    for row, (slot, length) in enumerate(zip(slots, LENGTHS, strict=True)):
        assert torch.equal(keys[slot, :, length], key[row]) and torch.equal(values[slot, :, length], value[row])
    return out, (query, keys, values, torch.tensor(slots))


def naive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    outs = []
    for row, length in enumerate(LENGTHS):
        first = max(0, length + 1 - window) if window else 0
        k, v = (x[slots[row], :, first : length + 1].repeat_interleave(3, 0).double() for x in (keys, values))
        scores = (query[row, :, None].double() @ k.mT) * query.shape[-1] ** -0.5
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].double()], -1)
        outs.append((scores.softmax(-1)[..., : v.shape[1]] @ v)[:, 0])
    return torch.stack(outs).float()


def groups_of(*members: list[int], num_shared: int = 80) -> PrefixGroups:
    order = [row for rows in members for row in rows]
    bounds = [0]
    for rows in members:
        bounds.append(bounds[-1] + len(rows))
    shared = [num_shared if len(rows) > 1 else 0 for rows in members]
    return PrefixGroups(torch.tensor(order), torch.tensor(bounds), torch.tensor(shared))


APART = groups_of(*([row] for row in range(len(LENGTHS))))
TOGETHER = groups_of([3], [7, 6], [0], [1], [2], [4], [5])


@pytest.mark.parametrize("size", [4, 20, 32, 80, 128, 200])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("groups", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("sinks", [None, SINKS, SINKS.bfloat16()], ids=["no sinks", "sinks", "bfloat16 sinks"])
def test_attention(kernels: Kernels, size: int, window: int | None, groups: PrefixGroups, sinks: Tensor | None) -> None:
    slots = [3, 1, 0, 2, 7, 5, 6, 4]
    for num_threads in (1, 2):
        out, cached = attended(kernels, size, window, groups, num_threads, slots, sinks)
        assert_near(out, naive_attention(*cached, window, sinks))


@pytest.mark.parametrize("cap", [0.1, 1.5, 50.0])
@pytest.mark.parametrize("groups", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_attention_with_a_cap(kernels: Kernels, cap: float, groups: PrefixGroups, sinks: Tensor | None) -> None:
    out, cached = attended(kernels, 20, 40, groups, 1, list(range(8)), sinks, cap)
    assert_near(out, naive_attention(*cached, 40, sinks, cap))
    other = naive_attention(*cached, 40, sinks, 1.1 * cap)
    assert (out - other).abs().max() > 3 * TOLERANCE


def test_shared_keys_are_read_from_the_groups_first_sequence(kernels: Kernels) -> None:
    """Keys that are not shared, or less than a whole tile of them, are read from each sequence."""
    wrong = groups_of([7, 6], *([row] for row in range(6)), num_shared=100)
    out, cached = attended(kernels, 32, None, wrong, 1, list(range(8)))
    wanted = naive_attention(*cached, None)
    assert_near(out[[0, 1, 2, 3, 4, 5, 7]], wanted[[0, 1, 2, 3, 4, 5, 7]])
    far = groups_of([5, 6], [7], *([row] for row in range(5)), num_shared=64)
    out, _ = attended(kernels, 32, None, far, 1, list(range(8)))
    assert (out[6] - wanted[6]).abs().max() > 0.01


def test_row_does_not_depend_on_others_or_on_sharing(kernels: Kernels) -> None:
    alone = attended(kernels, 128, None, APART, 1, list(range(8)))[0]
    assert torch.equal(alone, attended(kernels, 128, None, TOGETHER, 2, list(range(8)))[0])


def test_nonfinite_values_stay_in_their_row(kernels: Kernels) -> None:
    clean = random(4, 32)
    dirty = clean.clone()
    dirty[1, 3], dirty[2, 0] = math.nan, math.inf
    norm = RmsNorm(torch.ones(32), torch.tensor(1e-5))
    for function in (
        lambda x: kernels.add_rms_norm(x, None, norm)[1],
        lambda x: kernels.gated(x, x, swiglu)[0],
        lambda x: kernels.sample(x, torch.ones(4), torch.full((4,), 0.5))[1][:, None],
    ):
        before, after = function(clean), function(dirty)
        assert torch.equal(before[[0, 3]], after[[0, 3]])
        assert not after[1].isfinite().all() and not after[2].isfinite().all()


def chosen(kernels: Kernels, logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    rows = len(uniform)
    tokens, logprobs = kernels.sample(logits.expand(rows, -1), torch.full((rows,), temperature), uniform)
    assert_near(logprobs, logits.log_softmax(-1)[tokens])
    return tokens


@pytest.mark.parametrize("vocab", [2, 15, 16, 1000, 40_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_token_is_chosen_where_the_cumulative_probability_passes_the_noise(
    kernels: Kernels, vocab: int, temperature: float
) -> None:
    logits = random(vocab)
    cumulated = (logits.double() / temperature).softmax(-1).cumsum(-1)
    uniform = torch.rand(2000, generator=torch.Generator().manual_seed(1))
    tokens = chosen(kernels, logits, temperature, uniform)
    upper = cumulated[tokens]
    lower = torch.where(tokens > 0, cumulated[(tokens - 1).clamp(min=0)], 0)
    assert (uniform <= upper + 1e-6).all() and (uniform >= lower - 1e-6).all()
    other = chosen(kernels, logits, 1.3 * temperature, uniform)
    assert not torch.equal(tokens, other)


def test_extreme_noise_chooses_only_possible_tokens(kernels: Kernels) -> None:
    logits = torch.full((100,), -math.inf)
    logits[[7, 50]] = torch.tensor([0.0, 1.0])
    tokens, logprobs = kernels.sample(logits.expand(2, -1), torch.ones(2), torch.tensor([0.0, 1 - 2**-24]))
    assert tokens.tolist() == [7, 50]
    assert_near(logprobs, logits.log_softmax(-1)[tokens])


def test_temperature_zero_chooses_the_first_likeliest_token(kernels: Kernels) -> None:
    logits = torch.zeros(3, 50)
    logits[1, [20, 30]] = 2.0
    logits[2, 49] = 1.0
    tokens, _ = kernels.sample(logits, torch.zeros(3), torch.full((3,), 0.9))
    assert tokens.tolist() == [0, 20, 49]


def test_rows_split_over_threads_match_single_rows(kernels: Kernels) -> None:
    logits, uniform = random(64, 5000), torch.rand(64, generator=torch.Generator().manual_seed(0))
    together = kernels.sample(logits, torch.ones(64), uniform)
    for row in range(64):
        one = kernels.sample(logits[row : row + 1], torch.ones(1), uniform[row : row + 1])
        assert one[0] == together[0][row] and one[1] == together[1][row]


def test_kernels_are_only_for_float32_on_the_cpu() -> None:
    assert kernels_for(torch.empty(1)) is not None
    assert kernels_for(torch.empty(1, dtype=torch.bfloat16)) is None
    assert kernels_for(torch.empty(1, device="meta")) is None
    assert kernels_for(torch.empty(1), torch.empty(1, dtype=torch.bfloat16)) is None


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a new process with an empty cache, and returns the cache's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels_module, "load_kernels", kernels_module.load_kernels.__wrapped__)
    return tmp_path


def test_kernels_are_compiled_once_for_all_processes(unloaded: Path) -> None:
    assert kernels_module.load_kernels() is not None
    (library,) = (unloaded / "trainhouse").iterdir()
    made = library.stat().st_mtime_ns
    assert kernels_module.load_kernels() is not None
    assert [path.stat().st_mtime_ns for path in (unloaded / "trainhouse").iterdir()] == [made]


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_torch_is_used_with_a_warning(
    unloaded: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert kernels_module.kernels_for(torch.empty(1)) is None
    assert compiler in caplog.text
    assert not list((unloaded / "trainhouse").iterdir())


def test_without_triton_a_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "trainhouse.workers.ops.triton_kernels", raising=False)
    with caplog.at_level(logging.WARNING):
        assert kernels_module.load_triton_kernels.__wrapped__(torch.device("cpu")) is None
    assert "passes on cpu" in caplog.text and "Install gcc or clang, and a CUDA build of torch" in caplog.text


def test_kernels_load_without_a_writable_cache(unloaded: Path) -> None:
    # A file in its place, because root may ignore the mode of a directory.
    (unloaded / "trainhouse").touch()
    assert kernels_module.load_kernels() is not None
