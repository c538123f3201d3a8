"""Multi-adapter LoRA against peft, and isolation of the adapters in one packed row."""

import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import ExpertFactors, LoraConfig
from trainhouse.workers.lora import Segment
from trainhouse.workers.ops import linear as linear_module
from trainhouse.workers.ops.linear import compiled_linear, torch_linear
from trainhouse.workers.shapes.model_shape import ModelShape

from ...tiny import KINDS, tiny_model
from ..adapted import (
    LENGTHS,
    Adapted,
    copy_adapter,
    create_adapter,
    load_in_peft,
    peft_gradients,
    peft_logits,
    probe,
    relative_error,
    sequences,
    stacked_gradients,
)

TOLERANCE = 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_equal_peft(kind: str, tiny_models: dict[str, Path]) -> None:
    assert_equal_to_peft(Adapted(tiny_models[kind]))


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_moe_mixed", "qwen2_moe"])
def test_experts_that_share_factors_equal_peft_with_copies(kind: str, tiny_models: dict[str, Path]) -> None:
    assert_equal_to_peft(Adapted(tiny_models[kind]), "shared")


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()), reason="torch without oneDNN"
)
def test_forward_and_gradients_equal_peft_with_onednn(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "Path", lambda _: tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("vendor_id : AuthenticAMD")
    assert linear_module.frozen_product(torch.device("cpu"), torch.float32) is compiled_linear
    assert_equal_to_peft(Adapted(tiny_models["qwen2"]))


def assert_equal_to_peft(adapted: Adapted, expert_factors: ExpertFactors = "each") -> None:
    adapter = adapted.create("one", expert_factors=expert_factors)
    tuned = load_in_peft(adapted.directory, adapter)

    logits, wanted = adapted.logits(sequences(), adapter), peft_logits(tuned, sequences())
    adapter.gradients.begin_operation()
    (logits * probe(logits)).sum().backward()
    (wanted * probe(wanted)).sum().backward()

    assert relative_error(logits, wanted) < TOLERANCE
    gradients = adapter.layout.named_views(adapter.gradients.scratch)
    num_experts = max(target.num_experts or 0 for target in adapter.targets)
    wanted_gradients = peft_gradients(tuned, num_experts)
    if expert_factors == "shared":
        wanted_gradients = stacked_gradients(wanted_gradients, num_experts)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert relative_error(gradients[name], gradient) < 10 * TOLERANCE, name
        assert relative_error(1.0001 * gradients[name], gradient) > 10 * TOLERANCE


def test_comparison_with_peft_detects_a_small_weight_error(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    adapter = adapted.create("one")
    tuned = load_in_peft(adapted.directory, adapter)
    adapter.weights.mul_(1 + 1e-4)
    assert relative_error(adapted.logits(sequences(), adapter), peft_logits(tuned, sequences())) > TOLERANCE


def test_adapters_of_two_ranks_in_one_row_equal_each_alone(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    small, large = adapted.create("small", rank=2), adapted.create("large", rank=8, train_mlp=False)
    rows = sequences()
    border = LENGTHS[0]
    mixed = adapted.hidden(rows, [Segment(0, border, small), Segment(border, sum(LENGTHS), large)])
    (mixed * probe(mixed)).sum().backward()
    gradients = [small.gradients.scratch.clone(), large.gradients.scratch.clone()]
    weight = probe(mixed)

    for adapter, part, rows_alone, gradient in (
        (small, slice(0, border), rows[:1], gradients[0]),
        (large, slice(border, None), rows[1:], gradients[1]),
    ):
        adapter.gradients.begin_operation()
        alone = adapted.hidden(rows_alone, [Segment(0, sum(map(len, rows_alone)), adapter)])
        (alone * weight[part]).sum().backward()
        assert relative_error(mixed[part], alone) < TOLERANCE
        assert relative_error(gradient, adapter.gradients.scratch) < 10 * TOLERANCE
    other = adapted.hidden(rows[:1], [Segment(0, border, large)])
    assert relative_error(mixed[:border], other) > 1e-2


def test_gradients_of_an_adapters_segments_add_up(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    adapter = adapted.create("one")
    total, gradients = sum(LENGTHS), []
    for segments in ([Segment(0, total, adapter)], [Segment(0, 7, adapter), Segment(7, total, adapter)]):
        adapter.gradients.begin_operation()
        hidden = adapted.hidden(sequences(), segments)
        (hidden * probe(hidden)).sum().backward()
        gradients.append(adapter.gradients.scratch.clone())
    assert relative_error(*gradients) < 10 * TOLERANCE


def test_segment_without_adapter_runs_the_bare_base(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    adapter = adapted.create("one")
    border = LENGTHS[0]
    bare = adapted.hidden(sequences(), [])
    both = adapted.hidden(sequences(), [Segment(0, border, adapter), Segment(border, sum(LENGTHS), None)])
    assert not bare.requires_grad
    assert torch.equal(both[border:], bare[border:])
    assert relative_error(both[:border], bare[:border]) > 1e-2


def test_nothing_requires_a_gradient_under_no_grad(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    with torch.no_grad():
        segments = [Segment(0, sum(LENGTHS), adapted.create("one"))]
        hidden = adapted.hidden(sequences(), segments)
    assert not hidden.requires_grad
    with_gradient = adapted.hidden(sequences(), segments)
    assert with_gradient.requires_grad and relative_error(hidden, with_gradient) < 5e-6


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_nan_in_one_segment_stays_in_it(kind: str, tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models[kind])
    sick, well = adapted.create("sick"), adapted.create("well", rank=8)
    border = LENGTHS[0]
    segments = [Segment(0, border, sick), Segment(border, sum(LENGTHS), well)]

    def run() -> torch.Tensor:
        well.gradients.begin_operation()
        hidden = adapted.hidden(sequences(), segments)
        (hidden * probe(hidden)).sum().backward()
        return hidden

    healthy, gradient = run(), well.gradients.scratch.clone()
    sick.weights.fill_(torch.nan)
    with_nan = run()
    assert with_nan[:border].isnan().all()
    # Not bit for bit: tokens that are NaN choose other experts, whose batches then have other sizes.
    assert relative_error(with_nan[border:], healthy[border:]) < TOLERANCE
    assert relative_error(well.gradients.scratch, gradient) < 10 * TOLERANCE
    assert well.gradients.are_finite()
    assert not sick.gradients.are_finite()


def test_new_adapter_has_no_effect_and_is_drawn_from_its_seed(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    first = create_adapter(adapted.models, "first", LoraConfig(rank=8, seed=3))
    again = create_adapter(adapted.models, "again", LoraConfig(rank=8, seed=3))
    other = create_adapter(adapted.models, "other", LoraConfig(rank=8, seed=4))
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)
    pair = first.pairs["model.layers.0.self_attn.q_proj"]
    bound = 1 / math.sqrt(64)
    assert 0.9 * bound < pair.a.abs().max() <= bound
    assert not pair.b.any()
    for seed in (-1, 2**64 - 1):
        create_adapter(adapted.models, str(seed), LoraConfig(rank=2, seed=seed))
    with_it = adapted.logits(sequences(), first)
    assert torch.equal(with_it, adapted.logits(sequences(), None))


def test_the_flags_choose_the_targets(tiny_models: dict[str, Path]) -> None:
    layers = Adapted(tiny_models["qwen3"]).lora

    def kinds(attn: bool, mlp: bool, unembed: bool) -> set[str]:
        lora = LoraConfig(rank=2, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
        return {target.kind for target in layers.build(lora).targets}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert kinds(True, True, True) == attention | mlp | {"lm_head"}
    assert kinds(True, False, False) == attention
    assert kinds(False, True, False) == mlp
    assert kinds(False, False, True) == {"lm_head"}
    with pytest.raises(OperationError, match="selects no linear layer"):
        kinds(False, False, False)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5", "granite4"])
def test_every_linear_layer_that_a_family_declares_is_adapted(kind: str, tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models[kind])
    shape = adapted.base.shape
    assert isinstance(shape, ModelShape)
    declared = {name for layer in shape.layers for part in layer.mixers for w in part.weights() for name in w.adapters}
    targets = {target.name.rpartition(".")[2] for target in adapted.lora.all_targets}
    assert declared and {name.rpartition(".")[2] for name in declared} <= targets


def test_a_mixture_of_experts_trains_its_dense_layers_and_each_expert(tmp_path: Path) -> None:
    directory = tiny_model("qwen3_moe", tmp_path, mlp_only_layers=[0])
    lora = LoraConfig(rank=2, train_attn=False, train_unembed=False)
    layers = Adapted(directory).lora
    adapter, sharing = layers.build(lora), layers.build(lora.model_copy(update={"expert_factors": "shared"}))
    dense = {f"model.layers.0.mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    sparse = {f"model.layers.1.mlp.experts.{kind}_proj" for kind in ("gate", "up", "down")}
    for each in (adapter, sharing):
        assert {target.name for target in each.targets} == dense | sparse
    assert adapter.layout.num_weights == 2 * 3 * ((64 + 128) + 4 * (64 + 32))
    assert len(adapter.layout.named_views(adapter.weights)) == 2 * 3 * (1 + 4)
    assert sharing.layout.num_weights == 2 * 3 * ((64 + 128) + (64 + 4 * 32))
    assert len(sharing.layout.named_views(sharing.weights)) == 2 * 3 * (1 + 1)


def test_a_rank_above_the_limit_is_refused_with_the_remedy(tiny_models: dict[str, Path]) -> None:
    models = Adapted(tiny_models["llama"], max_rank=16).models
    with pytest.raises(OperationError, match=r"rank 17 exceeds max_lora_rank 16: .*--max-lora-rank 17"):
        create_adapter(models, "large", LoraConfig(rank=17))
    assert "large" not in models


def test_unknown_adapter_is_named_in_the_error(tiny_models: dict[str, Path]) -> None:
    models = Adapted(tiny_models["llama"]).models
    with pytest.raises(KeyError, match="no model 'missing'"):
        models.get("missing")
    models.drop("missing")


def test_copy_is_a_snapshot_until_copied_again(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    run = adapted.create("run")
    snapshot = copy_adapter(adapted.models, "run", "sampler")
    run.weights.add_(1.0)
    assert not torch.equal(snapshot.weights, run.weights)
    assert copy_adapter(adapted.models, "run", "sampler") is snapshot
    assert torch.equal(snapshot.weights, run.weights)
    assert snapshot.vectors.num_bytes == snapshot.weights.nbytes


def test_operation_enters_the_gradient_window_only_on_commit(tiny_models: dict[str, Path]) -> None:
    adapter = Adapted(tiny_models["llama"]).create("one")
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.fill_(1.0)
    adapter.gradients.commit(num_tokens=3, weight_sum=2.0, losses={"loss:sum": 1.5})
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.fill_(5.0)
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.fill_(2.0)
    adapter.gradients.commit(num_tokens=1, weight_sum=0.5, losses={"loss:sum": 1.0, "kl:sum": 7.0})
    assert (adapter.gradients.accumulator == 3.0).all()
    assert (
        adapter.gradients.window.num_operations,
        adapter.gradients.window.num_tokens,
        adapter.gradients.window.weight_sum,
    ) == (2, 4, 2.5)
    assert adapter.gradients.window.losses == {"loss:sum": 2.5, "kl:sum": 7.0}
    adapter.gradients.clear_window()
    assert not adapter.gradients.accumulator.any()


def test_a_dropped_adapter_is_freed_at_once(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    dropped, kept = (weakref.ref(adapted.create(adapter_id)) for adapter_id in ("dropped", "kept"))
    gc.disable()
    try:
        adapter = adapted.models.get("dropped")
        adapted.logits(sequences(), adapter).sum().backward()
        del adapter
        adapted.models.drop("dropped")
        assert dropped() is None
        assert kept() is not None
    finally:
        gc.enable()


def test_a_bfloat16_base_keeps_float32_adapters_within_rounding(tiny_models: dict[str, Path]) -> None:
    exact, rounded = Adapted(tiny_models["qwen3"]), Adapted(tiny_models["qwen3"], dtype="bfloat16")
    hiddens, gradients = [], []
    for adapted in (exact, rounded):
        # Its weights are changed after creation, which the bfloat16 products must notice.
        adapter = adapted.create("one", rank=8)
        hidden = adapted.hidden(sequences(), [Segment(0, sum(LENGTHS), adapter)])
        (hidden.float() * probe(hidden)).sum().backward()
        hiddens.append(hidden.float())
        gradients.append(adapter.gradients.scratch)
    assert gradients[1].dtype == torch.float32
    snapshot = copy_adapter(rounded.models, "one", "sampler")
    rounded.hidden(sequences(), [Segment(0, sum(LENGTHS), snapshot)])
    assert snapshot.vectors.num_bytes == 1.5 * snapshot.weights.nbytes
    assert relative_error(hiddens[1], hiddens[0]) < 5e-2
    assert relative_error(gradients[1], gradients[0]) < 1e-1
    assert relative_error(exact.hidden(sequences(), []), hiddens[0]) > 1e-1


def test_segments_must_reach_the_end_of_the_row(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    with pytest.raises(AssertionError, match="17 tokens, but the segments end at 16"):
        adapted.hidden(sequences(), [Segment(0, 16, adapted.create("one"))])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_product_equals_torch_linear(bias: bool) -> None:
    x, weight = torch.randn(33, 24), torch.randn(40, 24)
    shift = torch.randn(40) if bias else None
    assert relative_error(compiled_linear(x, weight, shift), linear(x, weight, shift)) < TOLERANCE
    grad = torch.randn(33, 40)
    assert relative_error(compiled_linear(grad, weight.t()), grad @ weight) < TOLERANCE
    assert relative_error(compiled_linear(x, weight * (1 + 1e-5), shift), linear(x, weight, shift)) > TOLERANCE
    addend = torch.randn(33, 40)
    wanted = linear(x, weight, shift) + addend
    assert relative_error(compiled_linear(x, weight, shift, addend.clone()), wanted) < TOLERANCE
    assert relative_error(torch_linear(x, weight, shift, addend.clone()), wanted) < TOLERANCE
