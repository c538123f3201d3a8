"""The products of adapted layers against the formula written out per segment, with autograd on dense matrices."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from trainhouse.workers.lora import Adapter, LoraLinear, MergedLoraLinear, Segment

from .adapted import Adapted, relative_error

TOLERANCE = 2e-6
ATTENTION = ("q_proj", "k_proj", "v_proj")


def layer(adapted: Adapted, name: str) -> LoraLinear:
    module = adapted.base.model.get_submodule(name)
    assert isinstance(module, LoraLinear)
    return module


def attention(adapted: Adapted) -> list[LoraLinear]:
    return [layer(adapted, f"model.layers.0.self_attn.{kind}") for kind in ATTENTION]


def naive(linears: Sequence[LoraLinear], x: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, dict[str, Tensor]]:
    """x (W + scale B A)^T + bias, segment by segment; and the leaves A and B by adapter and layer."""
    leaves: dict[str, Tensor] = {}
    outputs = []
    for segment in segments:
        rows = x[segment.start : segment.stop]
        parts = []
        for module in linears:
            (name,) = module.site.names
            weight = module.weight
            pair = segment.adapter.pairs.get(name) if segment.adapter else None
            if pair is not None:
                a = leaves.setdefault(f"{id(segment.adapter)} {name} a", pair.a.clone().requires_grad_())
                b = leaves.setdefault(f"{id(segment.adapter)} {name} b", pair.b.clone().requires_grad_())
                weight = weight + pair.scale * b @ a
            parts.append(linear(rows, weight, module.bias))
        outputs.append(torch.cat(parts, dim=1))
    return torch.cat(outputs), leaves


def assert_equal_to_naive(
    module: LoraLinear | MergedLoraLinear,
    linears: Sequence[LoraLinear],
    adapted: Adapted,
    segments: Sequence[Segment],
    tolerance: float = TOLERANCE,
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(segments[-1].stop, linears[0].weight.shape[1], generator=generator, requires_grad=True)
    adapters = {id(segment.adapter): segment.adapter for segment in segments if segment.adapter is not None}
    for adapter in adapters.values():
        adapter.begin_operation()
    with adapted.adapters.applied(segments):
        y = module(x)
        probe = torch.randn(y.shape, generator=generator)
        (grad_x,) = torch.autograd.grad((y * probe).sum(), x)
    wanted, leaves = naive(linears, x, segments)
    gradients = torch.autograd.grad((wanted * probe).sum(), [x, *leaves.values()])

    assert relative_error(y, wanted) < tolerance
    assert relative_error(grad_x, gradients[0]) < tolerance
    for key, gradient in zip(leaves, gradients[1:], strict=True):
        adapter_id, name, which = key.split()
        pair = adapters[int(adapter_id)].pairs[name]
        found = pair.a_grad if which == "a" else pair.b_grad
        assert relative_error(found, gradient) < tolerance, key


def mixed_segments(adapted: Adapted) -> list[Segment]:
    """Of different ranks, alphas, targets and lengths, with a stretch of the bare base and an adapter that returns."""
    first = adapted.create("first", rank=8)
    adapters: list[Adapter | None] = [
        first,
        adapted.create("alpha", rank=8, alpha=5.0),
        adapted.create("thin", rank=2),
        None,
        adapted.create("mlp", rank=4, train_attn=False),
        adapted.create("wide", rank=33, train_mlp=False),
        first,
    ]
    segments, start = [], 0
    for adapter, length in zip(adapters, [7, 7, 5, 4, 3, 1, 6], strict=True):
        segments.append(Segment(start, start + length, adapter))
        start += length
    return segments


def test_a_layer_equals_the_formula_per_segment(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    module = attention(adapted)[0]
    assert_equal_to_naive(module, [module], adapted, mixed_segments(adapted))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_merged_layers_equal_the_formula_per_segment(kind: str, tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models[kind])
    linears = attention(adapted)
    merged = MergedLoraLinear(linears)
    segments = mixed_segments(adapted)
    assert_equal_to_naive(merged, linears, adapted, segments)
    with pytest.raises(AssertionError):
        assert_equal_to_naive(merged, linears, adapted, segments, tolerance=1e-9)


def test_merged_layers_hold_their_weights_once_and_still_work_alone(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    linears = attention(adapted)
    num_parameters, x = adapted.base.model.num_parameters(), torch.randn(5, 64)
    before = torch.cat([module(x) for module in linears], dim=1)
    merged = MergedLoraLinear(linears)
    assert merged.out_features == (64, 32, 32)
    assert len({module.weight.untyped_storage().data_ptr() for module in linears}) == 1
    assert adapted.base.model.num_parameters() == num_parameters
    assert relative_error(merged(x), before) < TOLERANCE
    assert relative_error(torch.cat([module(x) for module in linears], dim=1), before) < TOLERANCE
