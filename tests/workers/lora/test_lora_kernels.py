"""Adapted layers against the formula per segment, with autograd on dense matrices; and the work that they skip."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from trainhouse.workers.lora import Adapter, LoraLinear, MergedLoraLinear, Segment
from trainhouse.workers.lora.batch_plan import LinearSite, fold
from trainhouse.workers.lora.segment import RowGroup, group_segments
from trainhouse.workers.lora.segmented_matmul import PaddedLengths, RaggedLengths, SegmentedMatmul, SingleAdapter

from ..adapted import Adapted, Dtype, pair_gradients, probe, relative_error, sequences

TOLERANCE = 2e-6
LAYER = "model.layers.0"
UNEVEN, EVEN = (7, 9, 5, 4, 3, 1, 6, 2), (4,) * 8


@pytest.fixture(params=["chosen", "padded", "ragged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Multiplies the rows of several adapters as chosen for their lengths, or always in the same way."""
    ways: dict[str, Callable[..., SegmentedMatmul]] = {"padded": PaddedLengths, "ragged": RaggedLengths}
    if request.param in ways:

        def always(lengths: list[int], scales: list[float], device: torch.device, _aligned: bool) -> SegmentedMatmul:
            return SingleAdapter(*scales) if len(scales) == 1 else ways[request.param](lengths, scales, device)

        monkeypatch.setattr("trainhouse.workers.lora.segment.choose_matmul", always)
    return request.param


def layers(adapted: Adapted, *names: str) -> list[LoraLinear]:
    """Returns layers of the model's first decoder layer."""
    modules = [adapted.base.model.get_submodule(f"{LAYER}.{name}") for name in names]
    return [module for module in modules if isinstance(module, LoraLinear)]


def qkv(adapted: Adapted) -> list[LoraLinear]:
    return layers(adapted, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def segments_of(adapters: Sequence[Adapter | None], lengths: Sequence[int]) -> list[Segment]:
    return [
        Segment(stop - length, stop, adapter)
        for adapter, length, stop in zip(adapters, lengths, accumulate(lengths), strict=True)
    ]


def mixed(adapted: Adapted, lengths: Sequence[int]) -> list[Segment]:
    """Returns segments of different ranks, alphas and targets; one is of the bare base, and one adapter has two."""
    first = adapted.create("first", rank=8)
    adapters = [
        first,
        adapted.create("alpha", rank=8, alpha=5.0),
        adapted.create("thin", rank=2),
        None,
        adapted.create("mlp", rank=4, train_attn=False),
        adapted.create("wide", rank=33, train_mlp=False),
        adapted.create("other", rank=30, train_mlp=False),
        first,
    ]
    return segments_of(adapters, lengths)


def naive(linears: Sequence[LoraLinear], x: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns x (W + scale B A)^T + bias, segment by segment; and the leaves A and B by adapter and layer."""
    leaves: dict[str, Tensor] = {}
    outputs = []
    for segment in segments:
        parts = []
        for module in linears:
            (name,) = module.site.names
            weight = module.weight.float()
            pair = segment.adapter.pairs.get(name) if segment.adapter else None
            if pair is not None:
                a = leaves.setdefault(f"{id(segment.adapter)} {name} a", pair.a.clone().requires_grad_())
                b = leaves.setdefault(f"{id(segment.adapter)} {name} b", pair.b.clone().requires_grad_())
                weight = weight + pair.scale * b @ a
            bias = None if module.bias is None else module.bias.float()
            parts.append(linear(x[segment.start : segment.stop], weight, bias))
        outputs.append(torch.cat(parts, dim=1))
    return torch.cat(outputs), leaves


def assert_equal_to_naive(
    module: LoraLinear | MergedLoraLinear,
    linears: Sequence[LoraLinear],
    adapted: Adapted,
    segments: Sequence[Segment],
    tolerance: float = TOLERANCE,
) -> None:
    """Compares the output, the gradient of the input, and the gradients of every A and B."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(segments[-1].stop, linears[0].weight.shape[1], generator=generator, requires_grad=True)
    adapters = {id(segment.adapter): segment.adapter for segment in segments if segment.adapter is not None}
    for adapter in adapters.values():
        adapter.gradients.begin_operation()
    with adapted.lora.applied(segments):
        y = module(x.to(adapted.base.dtype)).float()
        weights = torch.randn(y.shape, generator=generator)
        (grad_x,) = torch.autograd.grad((y * weights).sum(), x)
    wanted, leaves = naive(linears, x, segments)
    gradients = torch.autograd.grad((wanted * weights).sum(), [x, *leaves.values()])

    assert relative_error(y, wanted) < tolerance
    assert relative_error(grad_x, gradients[0]) < tolerance
    for key, gradient in zip(leaves, gradients[1:], strict=True):
        adapter_id, name, which = key.split()
        found = pair_gradients(adapters[int(adapter_id)], name)["ab".index(which)]
        assert relative_error(found, gradient) < tolerance, key


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
@pytest.mark.parametrize("lengths", [UNEVEN, EVEN])
def test_a_layer_equals_the_formula_per_segment(
    lengths: Sequence[int], name: str, tiny_models: dict[str, Path]
) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    (module,) = layers(adapted, name)
    assert_equal_to_naive(module, [module], adapted, mixed(adapted, lengths))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lengths", [UNEVEN, EVEN])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_merged_layers_equal_the_formula_per_segment(
    kind: str, lengths: Sequence[int], tiny_models: dict[str, Path]
) -> None:
    adapted = Adapted(tiny_models[kind])
    linears = qkv(adapted)
    merged = MergedLoraLinear(linears)
    segments = mixed(adapted, lengths)
    assert_equal_to_naive(merged, linears, adapted, segments)
    with pytest.raises(AssertionError):
        assert_equal_to_naive(merged, linears, adapted, segments, tolerance=1e-9)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 2, 6)])
def test_adapters_that_cover_the_row_equal_the_formula(lengths: Sequence[int], tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    (module,) = layers(adapted, "mlp.up_proj")
    adapters = [adapted.create(name, rank=rank) for name, rank in (("a", 8), ("b", 16), ("c", 5))]
    assert_equal_to_naive(module, [module], adapted, segments_of(adapters, lengths))


@pytest.mark.parametrize(("num_tokens", "adds_to_weight"), [(300, True), (100, False)])
def test_a_single_adapter_is_added_to_the_weight_in_long_rows(
    num_tokens: int, adds_to_weight: bool, tiny_models: dict[str, Path]
) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    linears = [*layers(adapted, "mlp.gate_proj"), *layers(adapted, "mlp.up_proj")]
    segments = segments_of([adapted.create("a", rank=5)], [num_tokens])
    for module, parts in ((linears[0], linears[:1]), (MergedLoraLinear(linears), linears)):
        terms = adapted.lora.plan(segments).terms(module.site, num_tokens)
        assert terms is not None and terms.is_long == adds_to_weight
        assert_equal_to_naive(module, parts, adapted, segments)
        with pytest.raises(AssertionError):
            assert_equal_to_naive(module, parts, adapted, segments, tolerance=1e-9)


@pytest.mark.usefixtures("way")
def test_a_bfloat16_layer_is_within_its_rounding(tiny_models: dict[str, Path]) -> None:
    dtype: Dtype = "bfloat16"
    adapted = Adapted(tiny_models["qwen2"], dtype=dtype)
    linears = qkv(adapted)
    segments = mixed(adapted, UNEVEN)
    for module, parts in ((linears[0], linears[:1]), (MergedLoraLinear(linears), linears)):
        assert_equal_to_naive(module, parts, adapted, segments, tolerance=2e-2)
        with pytest.raises(AssertionError):
            assert_equal_to_naive(module, parts, adapted, segments, tolerance=1e-4)


@pytest.mark.usefixtures("way")
def test_gradients_of_a_mixed_row_are_those_of_each_adapter_alone(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    ranks, lengths = (4, 8, 16, 32, 2), [6, 9, 6, 3, 11]
    adapters = [adapted.create(f"rank {rank}", rank=rank) for rank in ranks]
    rows, segments = sequences(lengths), segments_of(adapters, lengths)
    hidden = adapted.hidden(rows, segments)
    weights = probe(hidden)
    (hidden * weights).sum().backward()
    together = [adapter.gradients.scratch.clone() for adapter in adapters]

    for row, segment, adapter, gradient in zip(rows, segments, adapters, together, strict=True):
        adapter.gradients.begin_operation()
        alone = adapted.hidden([row], [Segment(0, len(row), adapter)])
        (alone * weights[segment.start : segment.stop]).sum().backward()
        assert relative_error(hidden[segment.start : segment.stop], alone) < TOLERANCE
        assert relative_error(gradient, adapter.gradients.scratch) < 2 * TOLERANCE
        assert relative_error(gradient * (1 + 1e-5), adapter.gradients.scratch) > 2 * TOLERANCE


@pytest.mark.usefixtures("way")
def test_nonfinite_adapter_leaves_the_others_bit_for_bit(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    (module,) = layers(adapted, "mlp.down_proj")
    sick, *well = [adapted.create(name, rank=rank) for name, rank in (("sick", 8), ("one", 8), ("other", 16))]
    segments = segments_of([well[0], sick, well[1]], [5, 3, 4])
    x = torch.randn(12, 128, requires_grad=True)
    grad = torch.randn(12, 64)

    def run() -> list[Tensor]:
        for adapter in well:
            adapter.gradients.begin_operation()
        with adapted.lora.applied(segments):
            y = module(x)
            (grad_x,) = torch.autograd.grad(y, x, grad)
        rest = torch.cat([torch.arange(5), torch.arange(8, 12)])
        return [y[rest], grad_x[rest], *(adapter.gradients.scratch.clone() for adapter in well)]

    healthy = run()
    sick.weights.fill_(torch.inf)
    grad[5:8] = torch.nan
    with torch.no_grad():
        x[5:8] = torch.nan
    assert all(torch.equal(before, after) for before, after in zip(healthy, run(), strict=True))
    assert not sick.gradients.are_finite()


def test_merged_layers_hold_their_weights_once_and_still_work_alone(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    linears = qkv(adapted)
    num_parameters, x = adapted.base.model.num_parameters(), torch.randn(5, 64)
    before = torch.cat([module(x) for module in linears], dim=1)
    merged = MergedLoraLinear(linears)
    assert merged.out_features == (64, 32, 32)
    assert len({module.weight.untyped_storage().data_ptr() for module in linears}) == 1
    assert adapted.base.model.num_parameters() == num_parameters
    assert relative_error(merged(x), before) < TOLERANCE
    assert relative_error(torch.cat([module(x) for module in linears], dim=1), before) < TOLERANCE


def test_adjacent_segments_are_grouped_only_if_compatible(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    a, b, c = (adapted.create(name) for name in "abc")
    mlp, wide = adapted.create("mlp", train_attn=False), adapted.create("wide", rank=64)

    def members(*adapters: Adapter | None, lengths: Sequence[int] | None = None) -> list[list[Adapter | None]]:
        segments = segments_of(adapters, lengths or [3] * len(adapters))
        return [[segment.adapter for segment in group] for group in group_segments(segments, splits_long=False)]

    assert members(a, b, c) == [[a, b, c]]
    assert members(a, None, b) == [[a], [b]]
    assert members(None) == []
    assert members(a, b, a, c) == [[a, b], [a, c]]
    assert members(a, mlp, b) == [[a], [mlp], [b]]
    assert members(a, b, c, wide) == [[a, b, c], [wide]]
    assert members(a, b, c, lengths=[2, 0, 2]) == [[a, c]]


def test_long_segments_are_split_off_unless_equal(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    adapters = [adapted.create(name) for name in "abcd"]

    def split(*lengths: int) -> list[list[int]]:
        segments = segments_of(adapters, lengths)
        assert len(group_segments(segments, splits_long=False)) == 1
        return [[segment.length for segment in group] for group in group_segments(segments, splits_long=True)]

    assert split(30, 40, 50, 60) == [[30, 40, 50, 60]]
    assert split(600, 600, 600, 600) == [[600, 600, 600, 600]]
    assert split(600, 30, 40, 700) == [[600], [30, 40], [700]]


def test_plan_is_reused_until_a_weight_changes_or_moves(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    one, other = adapted.create("one"), adapted.create("other", rank=8)
    (module,) = layers(adapted, "mlp.up_proj")
    segments = segments_of([one, other], [2, 3])
    plan, x = adapted.lora.plan(segments), torch.randn(5, 64)
    for _ in range(2):
        with adapted.lora.applied(plan):
            y = module(x)
        with adapted.lora.applied(segments):
            assert torch.equal(module(x), y)
    other.weights.mul_(2)
    with pytest.raises(AssertionError, match="have changed since the plan was made"), adapted.lora.applied(plan):
        pass
    with adapted.lora.applied(segments):
        assert relative_error(module(x), y) > 1e-2
    for change in (
        lambda: one.vectors.move("device", {"weights": one.weights.clone()}, {}),
        lambda: one.weights.mul_(2),
    ):
        plan = adapted.lora.plan(segments)
        assert plan.is_current
        change()
        assert not plan.is_current


def test_unadapted_layers_keep_no_graph_and_no_terms(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    query, down = layers(adapted, "self_attn.q_proj", "mlp.down_proj")
    adapter = adapted.create("mlp", train_attn=False)
    plan = adapted.lora.plan([Segment(0, 5, adapter)])
    with adapted.lora.applied(plan):
        assert query(torch.randn(5, 64)).grad_fn is None
        assert down(torch.randn(5, 128)).grad_fn is not None
    assert plan.terms(query.site, 5) is None and plan.terms(down.site, 5) is not None


def test_unadapted_layers_save_no_input_for_backward(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    query, down = layers(adapted, "self_attn.q_proj", "mlp.down_proj")
    segments = [Segment(0, 5, adapted.create("mlp", train_attn=False))]

    def kept(module: LoraLinear) -> list[tuple[int, ...]]:
        """Returns the shapes of what is saved for backward."""
        shapes: list[tuple[int, ...]] = []
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda saved: shapes.append(saved.shape), lambda nothing: nothing
        )
        with keep, adapted.lora.applied(segments):
            module(torch.randn(5, module.weight.shape[1], requires_grad=True))
        return shapes

    assert kept(query) == []
    assert kept(down) == [(5, 128)]


def test_no_gradients_for_the_frozen_base_or_the_first_input(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = Adapted(tiny_models["llama"])
    (module,) = layers(adapted, "mlp.down_proj")
    product, calls = module.active.product, []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        calls.append(weight.shape)
        return product(x, weight, bias, addend)

    monkeypatch.setattr(module.active, "product", counted)
    hidden = adapted.hidden(sequences(), segments_of([adapted.create("one")], [17]))
    num_forward = len(calls)
    (hidden * probe(hidden)).sum().backward()
    assert num_forward == 2 * 7
    assert len(calls) - num_forward == num_forward - 3, "all but the first layer's q, k and v"
    assert all(not p.requires_grad and p.grad is None for p in adapted.base.model.parameters())


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_folded_factors_equal_the_terms_and_share_no_memory(rank: int, tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    adapter = adapted.create("one", rank=rank, train_unembed=False)
    name = next(name for name in adapter.pairs if name.endswith("q_proj"))
    a, b = adapter.matrices(name)
    group = RowGroup(slice(0, 4), (adapter,), SingleAdapter(adapter.scale), is_whole=True)
    folded_a, folded_b = fold(LinearSite((name,), (b.shape[1],)), group)
    x = torch.randn(4, a.shape[1])
    assert relative_error(x @ folded_a @ folded_b, adapter.scale * (x @ a.t() @ b)) < 1e-6
    own = adapter.weights.untyped_storage().data_ptr()
    assert own not in {folded_a.untyped_storage().data_ptr(), folded_b.untyped_storage().data_ptr()}
