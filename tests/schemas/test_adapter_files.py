"""The forms of an adapter's file."""

import json
import re
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
from trainhouse.schemas.adapters.adapter_files import (
    Reader,
    refusal_by_vllm,
    write_for,
    write_for_cookbook,
    write_for_peft,
    write_for_vllm,
)
from trainhouse.schemas.adapters.peft import (
    CONFIG,
    DESCRIPTION,
    GATE_UP_PATTERN,
    WEIGHTS,
    Pair,
    block_diagonal,
    pairs_of,
    split_experts,
)
from trainhouse.schemas.adapters.tensor_file import FileTensor, TensorFile, write_tensors
from trainhouse.schemas.adapters.vllm_form import VllmForm

LINEARS = ("up_proj", "down_proj")
RANDOM = np.random.default_rng(0)
LAYER = "model.layers.0"


def matrix(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def stored(directory: Path, pairs: dict[str, Pair], description: dict[str, object]) -> Path:
    sides = ("lora_A", "lora_B")
    tensors = {
        f"base_model.model.{path}.{side}.weight": FileTensor.of(each)
        for path, pair in pairs.items()
        for side, each in zip(sides, pair, strict=True)
    }
    write_tensors(directory / WEIGHTS, tensors)
    config = {"r": 2, "lora_alpha": 32, "target_modules": sorted({path.rpartition(".")[2] for path in pairs})}
    (directory / CONFIG).write_text(json.dumps(config))
    (directory / DESCRIPTION).write_text(json.dumps(description))
    return directory


def test_projections_of_one_layer_become_one_pair() -> None:
    """Against each pair by itself, for outputs of unequal sizes."""
    pairs = [(matrix(rank, 6), matrix(out, rank)) for rank, out in ((2, 4), (3, 2), (2, 5))]
    a, b = block_diagonal(pairs)
    assert a.shape == (7, 6) and b.shape == (11, 7)
    wanted = np.concatenate([each_b @ each_a for each_a, each_b in pairs])
    np.testing.assert_allclose(b @ a, wanted, rtol=1e-5, atol=1e-6)
    a, b = block_diagonal([pairs[1], pairs[0], pairs[2]])
    assert np.abs(b @ a - wanted).max() > 0.1
    _, padded = block_diagonal(pairs, 13)
    assert np.array_equal(padded[:11], block_diagonal(pairs)[1]) and not padded[11:].any()


def test_separately_adapted_projections_are_fused_for_peft(tmp_path: Path) -> None:
    parts = ["in_proj_q", "in_proj_k", "in_proj_v"]
    pairs = {f"{LAYER}.mixer.{part}": (matrix(2, 6), matrix(3, 2)) for part in parts}
    others = {f"{LAYER}.mixer.out_proj": (matrix(2, 3), matrix(6, 2))}
    stored(tmp_path, pairs | others, {"fused_projections": {"in_proj_qkv": parts}})
    write_for_peft(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert found.keys() == {f"{LAYER}.mixer.in_proj_qkv", *others}
    fused = block_diagonal([pairs[f"{LAYER}.mixer.{part}"] for part in parts])
    assert all(np.array_equal(*each) for each in zip(found[f"{LAYER}.mixer.in_proj_qkv"], fused, strict=True))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_modules"] == ["in_proj_qkv", "out_proj"]
    assert config["rank_pattern"] == {"in_proj_qkv": 6} and config["alpha_pattern"] == {"in_proj_qkv": 96}


def test_only_layers_with_all_parts_are_fused_and_other_outputs_stay(tmp_path: Path) -> None:
    """A gate of Mamba-2 has the same name as that of a feed-forward part."""
    pairs = {f"{LAYER}.mamba.{part}": (matrix(2, 6), matrix(3, 2)) for part in ("gate_proj", "x_proj")}
    others = {f"{LAYER}.mlp.gate_proj": (matrix(2, 6), matrix(4, 2))}
    description = {"fused_projections": {"in_proj": ["gate_proj", "x_proj"]}, "fused_outputs": {"in_proj": 9}}
    stored(tmp_path, pairs | others, description)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["target_modules"] = ["gate_proj", "mamba.gate_proj", "mamba.x_proj"]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    write_for_peft(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert found.keys() == {f"{LAYER}.mamba.in_proj", *others}
    _, b = found[f"{LAYER}.mamba.in_proj"]
    assert b.shape == (9, 4) and not b[6:].any()
    assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == ["gate_proj", "mamba.in_proj"]


@pytest.mark.parametrize("form", [None, VllmForm()])
def test_experts_without_gates_are_joined_for_peft_alone(form: VllmForm | None, tmp_path: Path) -> None:
    experts = f"{LAYER}.mixer.experts"
    up, down = (matrix(1, 2, 6), matrix(3, 4, 2)), (matrix(3, 2, 4), matrix(1, 6, 2))
    description = {"lora": {"rank": 2}, "expert_linears": {"w1": "up_proj", "w2": "down_proj"}}
    description["stacked_experts"] = {"alternates": False, "is_transposed": False, "has_gate": False}
    stored(tmp_path, {f"{experts}.w1": up, f"{experts}.w2": down}, description)
    write_for_peft(tmp_path) if form is None else write_for_vllm(tmp_path, form)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    if form is None:
        assert found.keys() == {experts, f"{experts}.base_layer"}
        of_each = [split_experts(found[path], 3) for path in (f"{experts}.base_layer", experts)]
        pairs = {f"{experts}.{i}.{name}": of_each[place][i] for i in range(3) for place, name in enumerate(LINEARS)}
    else:
        pairs = found
    assert pairs.keys() == {f"{experts}.{number}.{linear}" for number in range(3) for linear in LINEARS}
    for number in range(3):
        for linear, (a, b) in zip(LINEARS, (up, down), strict=True):
            own_a, own_b = pairs[f"{experts}.{number}.{linear}"]
            assert np.array_equal(own_a, a[number % len(a)]) and np.array_equal(own_b, b[number % len(b)])


def test_experts_without_gates_have_other_names_for_the_cookbook(tmp_path: Path) -> None:
    experts = f"{LAYER}.mixer.experts"
    shapes = {"up_proj": (4, 6), "down_proj": (6, 4)}
    pairs = {
        f"{experts}.{number}.{linear}": (matrix(2, inputs), matrix(outputs, 2))
        for number in range(3)
        for linear, (outputs, inputs) in shapes.items()
    }
    stored(tmp_path, pairs, {})
    write_for_cookbook(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert {path: b.shape for path, (_, b) in found.items()} == {f"{experts}.w1": (3, 4, 2), f"{experts}.w2": (3, 6, 2)}
    write_for_vllm(tmp_path, VllmForm())
    back = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert back.keys() == pairs.keys()
    assert all(np.array_equal(one, other) for path in pairs for one, other in zip(back[path], pairs[path], strict=True))


@pytest.mark.parametrize("linears", [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]])
def test_matrices_shared_by_experts_are_copied_for_peft(linears: list[str], tmp_path: Path) -> None:
    gate, up, down = (
        (matrix(1, 2, 6), matrix(3, 4, 2)),
        (matrix(1, 2, 6), matrix(3, 4, 2)),
        (matrix(3, 2, 4), matrix(1, 6, 2)),
    )
    experts = f"{LAYER}.mlp.experts"
    stored(
        tmp_path,
        {f"{experts}.w1": gate, f"{experts}.w3": up, f"{experts}.w2": down},
        {"lora": {"rank": 2}, "expert_linears": dict(zip(("w1", "w3", "w2"), linears, strict=True))},
    )
    write_for_peft(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert found.keys() == {f"{experts}.{number}.{linear}" for number in range(3) for linear in linears}
    for number in range(3):
        for linear, (a, b) in zip(linears, (gate, up, down), strict=True):
            own_a, own_b = found[f"{experts}.{number}.{linear}"]
            assert np.array_equal(own_a, a[number % len(a)]) and np.array_equal(own_b, b[number % len(b)])
    assert json.loads((tmp_path / DESCRIPTION).read_text()) == {"lora": {"rank": 2, "expert_factors": "each"}}


@pytest.mark.parametrize("alternates", [False, True])
def test_matrices_of_stacked_experts_are_joined_for_peft(alternates: bool, tmp_path: Path) -> None:
    experts, sizes = f"{LAYER}.mlp.experts", {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    pairs = {
        f"{experts}.{number}.{linear}": (matrix(2, inputs), matrix(outputs, 2))
        for number in (1, 2, 0)
        for linear, (inputs, outputs) in sizes.items()
    }
    stored(tmp_path, pairs, {"stacked_experts": {"alternates": alternates, "is_transposed": False}})
    write_for_peft(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert found.keys() == {experts, f"{experts}.base_layer"}
    gate_up, down = split_experts(found[f"{experts}.base_layer"], 3), split_experts(found[experts], 3)
    for number in range(3):
        gate, up, of_down = (b @ a for a, b in (pairs[f"{experts}.{number}.{each}"] for each in sizes))
        wanted = np.concatenate([gate, up])
        if alternates:
            wanted[0::2], wanted[1::2] = gate, up
        for (a, b), product in ((gate_up[number], wanted), (down[number], of_down)):
            np.testing.assert_allclose(b @ a, product, rtol=1e-5, atol=1e-6)
            assert np.abs(1.001 * (b @ a) - product).max() > 1e-4


def patterned(directory: Path) -> None:
    """Gives the adapter the ranks that our checkpoints of sparse models name."""
    config = json.loads((directory / CONFIG).read_text())
    config |= {"rank_pattern": {GATE_UP_PATTERN: 4}, "alpha_pattern": {GATE_UP_PATTERN: 64}}
    (directory / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("experts", ["pairs", "joined"])
def test_vllm_is_told_of_ranks_that_the_file_has(experts: Literal["pairs", "joined"], tmp_path: Path) -> None:
    """vLLM refuses an adapter if any rank that its config names exceeds --max-lora-rank."""
    of_experts = f"{LAYER}.mlp.experts"
    sizes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    pairs = {
        f"{of_experts}.{number}.{linear}": (matrix(2, inputs), matrix(outputs, 2))
        for number in range(3)
        for linear, (inputs, outputs) in sizes.items()
    }
    stored(tmp_path, pairs, {})
    patterned(tmp_path)
    write_for_vllm(tmp_path, VllmForm(experts=experts))
    found, config = pairs_of(TensorFile(tmp_path / WEIGHTS)), json.loads((tmp_path / CONFIG).read_text())
    if experts == "pairs":
        assert found.keys() == pairs.keys() and config["rank_pattern"] == config["alpha_pattern"] == {}
    else:
        assert found.keys() == {of_experts, f"{of_experts}.base_layer"}
        assert config["rank_pattern"] == {GATE_UP_PATTERN: 4} and config["alpha_pattern"] == {GATE_UP_PATTERN: 64}


def test_layers_are_renamed_split_and_repeated_for_vllm(tmp_path: Path) -> None:
    a, b = matrix(2, 6), matrix(8, 2)
    keys, values = (matrix(2, 6), matrix(3, 2)), (matrix(2, 6), matrix(3, 2))
    pairs = {f"{LAYER}.mlp.gate_up_proj": (a, b), f"{LAYER}.attn.k_proj": keys, "lm_head": (matrix(2, 6), matrix(9, 2))}
    pairs |= {"model.layers.1.attn.k_proj": keys, "model.layers.1.attn.v_proj": values}
    stored(tmp_path, pairs, {})
    split, repeated = {"gate_up_proj": ("gate_proj", "up_proj")}, {"k_proj": "v_proj"}
    write_for_vllm(tmp_path, VllmForm(renamed={".mlp.": ".feed_forward."}, split=split, repeated=repeated))
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    wanted = {
        f"{LAYER}.feed_forward.gate_proj": (a, b[:4]),
        f"{LAYER}.feed_forward.up_proj": (a, b[4:]),
        f"{LAYER}.attn.v_proj": keys,
        **{path: pair for path, pair in pairs.items() if ".mlp." not in path},
    }
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(*each) for path in wanted for each in zip(found[path], wanted[path], strict=True))


@pytest.mark.parametrize(
    ("targets", "trains_head", "reason"),
    [
        (["mlp.up_proj"], True, "does not adapt the output head of this model: train .*train_unembed=False"),
        (["mlp.experts.up_proj"], False, "does not adapt layers .*such as mlp.experts.up_proj: .*train_mlp=False"),
        (["mlp.up_proj"], False, None),
    ],
)
def test_what_vllm_does_not_adapt_is_found_before_it_is_sent(
    targets: list[str], trains_head: bool, reason: str | None, tmp_path: Path
) -> None:
    stored(tmp_path, {}, {"lora": {"train_unembed": trains_head}, "targets": targets})
    found = refusal_by_vllm(tmp_path, VllmForm(ignored={".experts.": "train_mlp"}))
    assert found is None if reason is None else re.fullmatch(reason, found or "")
    if reason is not None:
        assert refusal_by_vllm(tmp_path, VllmForm(adapts_head=True)) is None


@pytest.mark.parametrize(
    ("form", "description", "reason"),
    [
        (VllmForm(refusal="does not know this model"), {}, "does not know this model"),
        (VllmForm(adapts_head=True), {"role": "critic"}, "samples no critics"),
        (VllmForm(adapts_head=True, halved=frozenset({"q_proj"})), {}, "needs the size of the heads, .*save it again"),
    ],
)
def test_vllm_takes_no_adapters_of_some_models(
    form: VllmForm, description: dict[str, object], reason: str, tmp_path: Path
) -> None:
    stored(tmp_path, {}, {"lora": {"train_unembed": True}, "targets": []} | description)
    assert re.fullmatch(reason, refusal_by_vllm(tmp_path, form) or "")
    assert refusal_by_vllm(tmp_path, VllmForm(adapts_head=True)) is None or "role" in description


def test_rows_of_heads_are_reordered_for_vllm(tmp_path: Path) -> None:
    """A rotation of neighbouring features becomes one of the halves of each head."""
    a, b = matrix(2, 6), matrix(12, 2)
    stored(tmp_path, {f"{LAYER}.attn.q_proj": (a, b), f"{LAYER}.attn.v_proj": (a, b)}, {"head_features": 6})
    write_for_vllm(tmp_path, VllmForm(halved=frozenset({"q_proj"})))
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert np.array_equal(found[f"{LAYER}.attn.q_proj"][1], b[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]])
    assert np.array_equal(found[f"{LAYER}.attn.v_proj"][1], b)


def described(directory: Path, architecture: str | None, trains_head: bool = True) -> Path:
    """Stores an adapter of a Mixtral, whose form in vLLM has other names."""
    of_model: dict[str, object] = {} if architecture is None else {"architecture": architecture}
    lora = {"lora": {"train_unembed": trains_head}, "targets": ["experts.up_proj"], "base_model": "a/b"}
    return stored(directory, {f"{LAYER}.mlp.experts.0.w1": (matrix(2, 6), matrix(4, 2))}, of_model | lora)


def test_the_form_in_vllm_follows_from_the_checkpoint(tmp_path: Path) -> None:
    paths = {}
    for reader in get_args(Reader):
        (directory := tmp_path / reader).mkdir()
        write_for(reader, described(directory, "MixtralForCausalLM"))
        paths[reader] = list(pairs_of(TensorFile(directory / WEIGHTS)))
    assert paths == {
        "peft": [f"{LAYER}.mlp.experts.0.w1"],
        "vllm": [f"{LAYER}.block_sparse_moe.experts.0.w1"],
    }


def test_what_vllm_does_not_read_is_not_written_for_it(tmp_path: Path) -> None:
    before = (described(tmp_path, "OlmoeForCausalLM") / WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match="vLLM does not adapt the output head of this model: train"):
        write_for("vllm", tmp_path)
    with pytest.raises(ValueError, match="does not name the class of a/b: load it into a model and save it again"):
        write_for("vllm", described(tmp_path, None))
    assert len((tmp_path / WEIGHTS).read_bytes()) == len(before)
    (tmp_path / f"{WEIGHTS}.age").touch()
    with pytest.raises(ValueError, match="encrypted files cannot be rewritten for vLLM: export them for peft"):
        write_for("vllm", tmp_path)


def test_matrices_of_experts_are_stacked_for_the_cookbook(tmp_path: Path) -> None:
    experts = f"{LAYER}.mlp.experts"
    order = (2, 0, 11, *range(3, 11), 1)  # not that of the names either
    pairs = {f"{experts}.{number}.down_proj": (matrix(2, 4), matrix(6, 2)) for number in order}
    others = {
        f"{LAYER}.mlp.shared_experts.down_proj": (matrix(2, 4), matrix(6, 2)),
        "lm_head": (matrix(2, 6), matrix(9, 2)),
    }
    stored(tmp_path, pairs | others, {})
    write_for_cookbook(tmp_path)
    found = pairs_of(TensorFile(tmp_path / WEIGHTS))
    assert found.keys() == {f"{experts}.w2", *others}
    a, b = found[f"{experts}.w2"]
    for number in range(12):
        of_one = pairs[f"{experts}.{number}.down_proj"]
        assert np.array_equal(a[number], of_one[0]) and np.array_equal(b[number], of_one[1])


def test_other_tensors_and_other_models_stay(tmp_path: Path) -> None:
    stored(tmp_path, {"lm_head": (matrix(2, 6), matrix(9, 2))}, {})
    file = TensorFile(tmp_path / WEIGHTS)
    tensors = {name: file.copied(name) for name in file} | {
        "base_model.model.score.weight": FileTensor.of(matrix(1, 6))
    }
    write_tensors(tmp_path / WEIGHTS, tensors)
    before = (tmp_path / WEIGHTS).read_bytes()
    write_for_cookbook(tmp_path)
    write_for_peft(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    for path in tmp_path.iterdir():
        path.unlink()
    write_for_cookbook(tmp_path)
    write_for_peft(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_incomplete_pair_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / WEIGHTS, {"base_model.model.lm_head.lora_A.weight": FileTensor.of(matrix(2, 6))})
    with pytest.raises(ValueError, match=r"has no base_model\.model\.lm_head\.lora_B\.weight"):
        pairs_of(TensorFile(tmp_path / WEIGHTS))
