"""Experts in grouped products against a loop over them: values and gradients, with adapters and without."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from trainhouse.workers.lora import Adapter, Segment
from trainhouse.workers.models.layers import GroupedExperts, activation_of
from trainhouse.workers.ops.grouped_gemm import GroupedRows
from trainhouse.workers.parallel.mesh import Mesh
from transformers import AutoModelForCausalLM, DeepseekV4Config, MiniMaxM3VLTextConfig, NemotronHConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ...tiny import tiny_config, tiny_model
from ..adapted import Adapted, relative_error

LAYER = "model.layers.0.mlp.experts"
EXACT = 1e-5


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_expert_layer_equals_transformers(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    model = AutoModelForCausalLM.from_config(
        tiny_config("qwen3_moe"), dtype=torch.float32, experts_implementation="eager"
    )
    block = model.base_model.layers[0].mlp.requires_grad_(False)
    for weight in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
        nn.init.normal_(weight, std=0.3)
    ours = GroupedExperts(block.experts, Mesh().along("ep"), ("gate_proj", "up_proj", "down_proj"), block.gate)
    x, gradient = torch.randn(num_tokens, 64, requires_grad=True), torch.randn(num_tokens, 64)
    theirs = block(x[None])[0]
    theirs.backward(gradient)
    wanted, x.grad = x.grad, None
    result = ours.forward(x)
    result.backward(gradient)
    assert wanted is not None and x.grad is not None
    assert (result - theirs).abs().max() <= EXACT * theirs.abs().max()
    assert (x.grad - wanted).abs().max() <= EXACT * wanted.abs().max()
    with torch.no_grad():
        assert (ours.forward(x) - theirs).abs().max() <= EXACT * theirs.abs().max()
        # Control: the tolerance detects a token that goes to another expert.
        block.experts.down_proj.copy_(block.experts.down_proj.roll(1, 0))
        assert (ours.forward(x) - theirs).abs().max() > 1e-2 * theirs.abs().max()


def experts_with(kind: str) -> nn.Module:
    """Returns the experts of a layer of transformers, with weights that reach the limits of clamped gates."""
    match kind:
        case "gpt_oss":
            experts = GptOssExperts(tiny_config("gpt_oss"))
        case "nemotron_h":
            experts = NemotronHExperts(
                NemotronHConfig(hidden_size=64, n_routed_experts=4, moe_intermediate_size=24, moe_latent_size=40)
            )
        case "minimax_m3_vl":
            sizes = {"hidden_size": 64, "num_local_experts": 4, "intermediate_size": 24}
            experts = MiniMaxM3VLExperts(MiniMaxM3VLTextConfig(**sizes))
        case _:
            experts = Qwen3MoeExperts(tiny_config("qwen3_moe", hidden_act=kind))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=1.0)
    return experts


@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh", "gpt_oss", "nemotron_h", "minimax_m3_vl"])
def test_experts_of_any_layout_equal_transformers(kind: str) -> None:
    """Compares values and the gradients of the tokens, of the weights and of the biases."""
    experts = experts_with(kind)
    ours = GroupedExperts(experts, Mesh().along("ep"), ("gate_proj", "up_proj", "down_proj"))
    chosen, weights = torch.rand(19, 4).topk(2).indices, torch.rand(19, 2)
    x, gradient = torch.randn(19, ours.hidden_size, requires_grad=True), torch.randn(19, ours.hidden_size)
    theirs = experts(x, chosen, weights)
    theirs.backward(gradient)
    leaves = {"x": x, **dict(experts.named_parameters())}
    wanted = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf)
    found = ours.forward_routed(x, chosen, weights)
    found.backward(gradient)
    assert relative_error(found, theirs) < EXACT
    for name, leaf in leaves.items():
        assert leaf.grad is not None and relative_error(leaf.grad, wanted[name]) < EXACT, name
    # Control: the tolerance detects a change of any of the parameters.
    for parameter in experts.parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter *= 1.01
            assert relative_error(ours.forward_routed(x, chosen, weights), theirs) > EXACT
            parameter.copy_(before)


@pytest.mark.parametrize("kind", ["gpt_oss", "nemotron_h"])
def test_experts_in_bfloat16_stay_within_its_rounding(kind: str) -> None:
    experts = experts_with(kind).bfloat16()
    ours = GroupedExperts(experts, Mesh().along("ep"), ("gate_proj", "up_proj", "down_proj"))
    chosen, weights = torch.rand(19, 4).topk(2).indices, torch.rand(19, 2).bfloat16()
    x, gradient = torch.randn(19, ours.hidden_size).bfloat16(), torch.randn(19, ours.hidden_size).bfloat16()
    rounded, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found = ours.forward_routed(rounded, chosen, weights)
    found.backward(gradient)
    wanted = experts.double()(exact, chosen, weights.double())
    wanted.backward(gradient.double())
    assert rounded.grad is not None and exact.grad is not None
    for one, other in ((found, wanted), (rounded.grad, exact.grad)):
        assert 1e-4 < relative_error(one.double(), other) < 2e-2


def test_other_experts_are_not_taken_for_these() -> None:
    """Their gates, activations or norms differ."""
    others = [Qwen3MoeExperts(tiny_config("qwen3_moe", hidden_act="gelu")), nn.Linear(2, 2)]
    others.append(DeepseekV4Experts(DeepseekV4Config(hidden_size=8, n_routed_experts=2, moe_intermediate_size=4)))
    assert [activation_of(each) for each in others] == [None] * 3
    assert activation_of(experts_with("gpt_oss")) is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_vectors_are_added_to_the_rows_of_their_group(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    groups = GroupedRows(torch.tensor([2, 0, 5, 0], device=device))
    vectors = torch.randn(4, 3).bfloat16().to(device)
    y = torch.zeros(9, 3, dtype=torch.bfloat16, device=device)
    groups.add_vectors(y, vectors)
    assert torch.equal(y, torch.cat([vectors[[0, 0, 2, 2, 2, 2, 2]], torch.zeros_like(vectors[:2])]))


def test_empty_groups_and_rows_of_no_group() -> None:
    x, weights = torch.randn(9, 5), torch.randn(4, 5, 3)
    groups = GroupedRows(torch.tensor([2, 0, 5, 0]))
    wanted = torch.cat([x[:2] @ weights[0], x[2:7] @ weights[2], torch.zeros(2, 3)])
    assert torch.allclose(groups.matmul(x, weights), wanted, atol=1e-6)
    y = torch.ones(9, 3)
    groups.add_matmul(y, x, weights)
    assert torch.allclose(y, 1 + wanted, atol=1e-6)
    right, totals = torch.randn(9, 4), [torch.ones(2, 5, 4), torch.ones(2, 3, 4)]  # the second's rank is lower
    groups.add_outer(totals, x, right)
    assert torch.allclose(totals[0], 1 + torch.stack([x[:2].t() @ right[:2], x[2:7].t() @ right[2:7]]), atol=1e-6)
    assert (totals[1] == 1).all()


# With adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Routes each token to two of eight experts, so that with few tokens some experts have none."""
    return Adapted(tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), num_experts=8))


@pytest.fixture(scope="module")
def without_gates(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tiny_model("nemotron_h_moe", tmp_path_factory.mktemp("model"), n_routed_experts=8))


def only_experts(adapted: Adapted, adapter_id: str, rank: int, **lora: object) -> Adapter:
    return adapted.create(adapter_id, rank=rank, train_attn=False, train_unembed=False, **lora)


def layer_of(adapted: Adapted) -> str:
    return next(iter(adapted.base.experts))


def experts_of(adapted: Adapted) -> GroupedExperts:
    return adapted.base.experts[layer_of(adapted)]


def loop(adapted: Adapted, x: Tensor, segments: Sequence[Segment], pairs: Mapping[Adapter, "Pairs"]) -> Tensor:
    """Computes each token with each of its experts, whose weights are merged with its adapter's pair."""
    block = adapted.base.model.get_submodule(layer_of(adapted).removesuffix(".experts"))
    _, weights, chosen = block.gate(x)
    rows = []
    for segment in segments:
        for i in range(segment.start, segment.stop):
            row = torch.zeros(x.shape[1])
            for weight, expert in zip(weights[i], chosen[i].tolist(), strict=True):
                matrices = matrices_of(block.experts, expert)
                if segment.adapter in pairs:
                    deltas = pairs[segment.adapter].deltas(expert)
                    matrices = [matrix + delta for matrix, delta in zip(matrices, deltas, strict=True)]
                *gate, up, down = matrices
                features = silu(gate[0] @ x[i]) * (up @ x[i]) if gate else (up @ x[i]).relu().square()
                row = row + weight * (features @ down.t())
            rows.append(row)
    return torch.stack(rows)


def matrices_of(experts: Any, expert: int) -> list[Tensor]:
    """Returns gate, up and down, or up and down."""
    before = experts.gate_up_proj[expert].chunk(2) if experts.has_gate else [experts.up_proj[expert]]
    return [*before, experts.down_proj[expert]]


class Pairs:
    """Holds an adapter's matrices for the experts of a layer, as leaves of autograd: [experts or 1, rank, n]."""

    def __init__(self, adapter: Adapter, layer: str) -> None:
        self._scale, self.leaves = adapter.scale, {}
        for name in (target.name for target in adapter.targets if target.name.startswith(f"{layer}.")):
            matrices = adapter.matrices(name)
            self.leaves[name] = [
                matrix.detach().clone().view(-1, adapter.lora.rank, matrix.shape[1]).requires_grad_()
                for matrix in matrices
            ]

    def deltas(self, expert: int) -> Iterator[Tensor]:
        for pair in self.leaves.values():
            a, b_t = (matrix[expert % len(matrix)] for matrix in pair)
            yield self._scale * b_t.t() @ a

    def largest_error(self, adapter: Adapter) -> float:
        """Returns the largest difference from the adapter's gradients, relative to the largest gradient."""
        errors = []
        for name, leaves in self.leaves.items():
            for leaf, found in zip(leaves, adapter.gradients.of_lane().views[name], strict=True):
                wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                errors.append(float((found.view_as(wanted) - wanted).abs().max() / wanted.abs().max()))
        return max(errors)


ROWS = {
    "one adapter": [("a", 19)],
    "one token": [("a", 1)],
    "with the bare base": [("a", 7), (None, 5), ("a", 3)],
    "of one rank": [("a", 6), ("b", 9), ("a", 4)],
    "of equal lengths": [("a", 6), ("b", 6)],
    "of mixed ranks": [("a", 6), ("c", 9), (None, 2), ("b", 5), ("d", 8)],
    "of many rows": [("a", 70), ("c", 90), ("b", 50)],
}


@pytest.mark.parametrize("factors", ["each", "shared", "both"])
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("bench", ["adapted", "without_gates"])
def test_expert_adapters_equal_a_loop_over_experts(
    bench: str, case: str, factors: str, request: pytest.FixtureRequest
) -> None:
    """Adapter d adapts other layers only. With so few tokens, some experts have none, or none of some adapter."""
    adapted: Adapted = request.getfixturevalue(bench)
    torch.manual_seed(0)
    names, of_each = f"{case}-{factors}", "each" if factors == "each" else "shared"
    made = {
        "a": only_experts(adapted, f"{names}-a", 4, expert_factors=of_each),
        "b": only_experts(adapted, f"{names}-b", 4, expert_factors="each" if factors == "both" else of_each),
        "c": only_experts(adapted, f"{names}-c", 5, expert_factors=of_each),
        "d": adapted.create(f"{names}-d", rank=4, train_mlp=False),
    }
    segments, start = [], 0
    for name, length in ROWS[case]:
        segments.append(Segment(start, start + length, made[name] if name else None))
        start += length
    used = {segment.adapter for segment in segments} - {None, made["d"]}
    pairs = {adapter: Pairs(adapter, layer_of(adapted)) for adapter in used if adapter is not None}
    x, gradient = torch.randn(start, 64, requires_grad=True), torch.randn(start, 64)

    wanted = loop(adapted, x, segments, pairs)
    wanted.backward(gradient)
    wanted_grad, x.grad = x.grad, None
    for adapter in made.values():
        adapter.gradients.begin_operation()
    with adapted.lora.applied(segments):
        found = experts_of(adapted).forward(x)
        found.backward(gradient)
        with torch.no_grad():
            without_gradient = experts_of(adapted).forward(x)
    assert x.grad is not None and wanted_grad is not None
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()
    assert (without_gradient - wanted).abs().max() <= EXACT * wanted.abs().max()
    assert (x.grad - wanted_grad).abs().max() <= EXACT * wanted_grad.abs().max()
    for adapter, of_adapter in pairs.items():
        assert of_adapter.largest_error(adapter) <= EXACT
    for adapter in made.values():
        if adapter not in pairs:
            assert not adapter.gradients.scratch.any()
    # Control: the tolerances detect bare experts, and another adapter's pairs.
    with torch.no_grad():
        bare = experts_of(adapted).forward(x)
        assert (bare - wanted)[: segments[0].stop].abs().max() > 1e-2 * wanted.abs().max()
    other = only_experts(adapted, f"{names}-other", 4, expert_factors=of_each)
    assert pairs[made["a"]].largest_error(other) > 0.5


@pytest.mark.parametrize("factors", ["each", "shared"])
def test_the_first_layer_learns_where_its_input_has_no_gradient(adapted: Adapted, factors: str) -> None:
    adapter = only_experts(adapted, f"first-{factors}", 4, expert_factors=factors)
    x = torch.randn(9, 64)
    with adapted.lora.applied([Segment(0, 9, adapter)]):
        experts_of(adapted).forward(x).sum().backward()
    for kind in ("gate_proj", "up_proj", "down_proj"):
        assert all(each.any() for each in adapter.gradients.of_lane().views[f"{LAYER}.{kind}"])


def test_shared_factors_are_copied_once_while_decoding(adapted: Adapted) -> None:
    adapters = [only_experts(adapted, f"sharing-{i}", 4 + i, expert_factors="shared") for i in range(2)]
    together, x = [Segment(0, 3, adapters[0]), Segment(3, 5, adapters[1])], torch.randn(5, 64)
    with torch.no_grad():
        plans, outputs = [], []
        for change in (0.0, 0.0, 1.0):
            if change:
                adapters[1].weights.add_(change)
            plans.append(adapted.lora.plan(together, plans[-1] if plans else None))
            with adapted.lora.applied(plans[-1]):
                outputs.append(experts_of(adapted).forward(x))
    kept = [plan.experts._shared[LAYER, tuple(adapters)] for plan in plans]
    assert kept[0] is kept[1] and kept[2] is not kept[0]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2][:3], outputs[0][:3]) and not torch.allclose(outputs[2][3:], outputs[0][3:])


def test_decoding_reuses_stacked_copies_and_copies_no_single_adapter(adapted: Adapted) -> None:
    adapters = [only_experts(adapted, f"decoding-{i}", 4) for i in range(2)]
    together = [Segment(0, 3, adapters[0]), Segment(3, 5, adapters[1])]
    x, name = torch.randn(5, 64), f"{LAYER}.up_proj"
    with torch.no_grad():
        plans = [adapted.lora.plan(together)]
        with adapted.lora.applied(plans[0]):
            before = experts_of(adapted).forward(x)
        plans.append(adapted.lora.plan([Segment(0, 2, adapters[0]), Segment(2, 5, adapters[1])], plans[0]))
        kept = [plan.experts.matrices(name, 0, plan.experts.bundles[0], 8, is_kept=True) for plan in plans]
        assert kept[0] is kept[1]
        adapters[1].weights.add_(1.0)
        later = adapted.lora.plan(together, plans[1])
        with adapted.lora.applied(later):
            after = experts_of(adapted).forward(x)
        assert torch.equal(after[:3], before[:3]) and not torch.allclose(after[3:], before[3:])
        alone = adapted.lora.plan([Segment(0, 5, adapters[0])]).experts
        views = [alone.matrices(name, 0, alone.bundles[0], 8, is_kept=True) for _ in range(2)]
        assert views[0] is not views[1] and views[0].data_ptr() == views[1].data_ptr()


@pytest.mark.parametrize("factors", ["each", "shared"])
def test_nan_of_one_adapter_stays_in_its_rows(adapted: Adapted, factors: str) -> None:
    sick = only_experts(adapted, f"sick-{factors}", 4, expert_factors=factors)
    well = only_experts(adapted, f"well-{factors}", 4, expert_factors=factors)
    x = torch.randn(12, 64, requires_grad=True)
    segments = [Segment(0, 6, sick), Segment(6, 12, well)]
    results = []
    for weight in (None, torch.nan):
        if weight is not None:
            sick.weights.fill_(weight)
        for adapter in (sick, well):
            adapter.gradients.begin_operation()
        with adapted.lora.applied(segments):
            y = experts_of(adapted).forward(x)
            y.backward(torch.ones_like(y))
        results.append((y.detach()[6:], well.gradients.scratch.clone()))
    assert y.detach()[:6].isnan().all() and not sick.gradients.are_finite()
    for healthy, with_nan in zip(*results, strict=True):
        assert torch.equal(healthy, with_nan)


@pytest.mark.parametrize("factors", ["each", "shared"])
def test_in_bfloat16_gradients_are_summed_in_float32(tmp_path: Path, factors: str) -> None:
    directory = tiny_model("qwen3_moe", tmp_path)
    x, gradients = torch.randn(40, 64), []
    for dtype in ("float32", "bfloat16"):
        adapted = Adapted(directory, dtype=dtype)
        adapter = only_experts(adapted, "run", 8, expert_factors=factors)
        with adapted.lora.applied([Segment(0, 40, adapter)]):
            y = experts_of(adapted).forward(x.to(adapted.base.dtype))
            y.backward(torch.ones_like(y))
        gradients.append(adapter.gradients.scratch)
    exact, rounded = gradients
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 3e-2 * exact.norm()
