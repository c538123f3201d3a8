"""Adapters merged into the files of their base models, see also tests/workers/checkpoint/test_adapted_types.py."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.schemas.adapters.merged_model import merge_into_base
from trainhouse.schemas.adapters.peft import CONFIG, DESCRIPTION, WEIGHTS

RANK, ALPHA = 2, 8.0


def base_model(directory: Path, dtype: torch.dtype, **more: Tensor) -> dict[str, Tensor]:
    """Saves weights in two files, with an index and a tokenizer."""
    torch.manual_seed(0)
    directory.mkdir()
    tensors = {
        "model.embed_tokens.weight": torch.randn(9000, 6).to(dtype),  # more rows than are merged at a time
        "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 6).to(dtype),
        "model.norm.weight": torch.randn(6),
        **more,
    }
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: tensors[name] for name in part}, directory / f"model-0000{number}-of-00002.safetensors")
    files = {name: f"model-0000{1 + (number > 1)}-of-00002.safetensors" for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"tok_embeddings": tensors[names[0]]}, directory / "consolidated.safetensors")  # another form
    (directory / "pytorch_model.bin").write_text("pickled")
    (directory / "tokenizer.json").write_text("words")
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "vocab_size": 9000}))
    return tensors


def adapter(directory: Path, shapes: dict[str, tuple[int, int]], **config: object) -> dict[str, tuple[Tensor, Tensor]]:
    """Saves an adapter for layers with these numbers of outputs and inputs; the head is tied."""
    directory.mkdir()
    pairs = {
        path: (torch.randn(RANK, inputs), torch.randn(outputs, RANK)) for path, (outputs, inputs) in shapes.items()
    }
    tensors = {
        f"base_model.model.{path}.lora_{side}.weight": each
        for path, pair in pairs.items()
        for side, each in zip("AB", pair, strict=True)
    }
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, **config}))
    tied = {"head": "lm_head", "embedding": "model.embed_tokens"}
    (directory / DESCRIPTION).write_text(json.dumps({"tied_head": tied} if "lm_head" in shapes else {}))
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_summed_and_rounded_as_by_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = base_model(tmp_path / "base", dtype)
    shapes = {"model.layers.0.self_attn.q_proj": (8, 6), "lm_head": (9000, 6)}
    pairs = adapter(tmp_path / "adapter", shapes)
    merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    found = {
        name: each for path in (tmp_path / "merged").glob("*.safetensors") for name, each in load_file(path).items()
    }
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(found[name], weights[name])
    sources = {"model.layers.0.self_attn.q_proj": "model.layers.0.self_attn.q_proj", "lm_head": "model.embed_tokens"}
    for path, source in sources.items():
        a, b = pairs[path]
        wanted = weights[f"{source}.weight"].float() + ALPHA / RANK * (b @ a)
        own = found[f"{path}.weight"]
        assert own.dtype == dtype
        # Up to the order of sums in the product, which rounds a number to its other neighbour now and then.
        assert float((own == wanted.to(dtype)).float().mean()) > (0.5 if dtype is torch.float32 else 0.999)
        torch.testing.assert_close(own, wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(own, weights[f"{source}.weight"], rtol=0.1, atol=0.1)


def test_stacked_weights_of_experts_are_merged_expert_by_expert(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    stacks = {f"{experts}.gate_up_proj": torch.randn(3, 2 * 4, 6), f"{experts}.down_proj": torch.randn(3, 6, 4)}
    base_model(tmp_path / "base", torch.float32, **stacks)
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    adapted = [(number, linear) for number in (0, 2) for linear in shapes]
    pairs = adapter(
        tmp_path / "adapter", {f"{experts}.{number}.{linear}": shapes[linear] for number, linear in adapted}
    )
    merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model-00002-of-00002.safetensors")
    for number in (0, 2):
        gate, up, down = (ALPHA / RANK * (b @ a) for a, b in (pairs[f"{experts}.{number}.{each}"] for each in shapes))
        stacks[f"{experts}.gate_up_proj"][number] += torch.cat([gate, up])
        stacks[f"{experts}.down_proj"][number] += down
    for name, wanted in stacks.items():
        torch.testing.assert_close(found[name], wanted)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found[name], wanted.flip(0))
    adapter(tmp_path / "other", {f"{experts}.0.up_proj": (5, 6)})
    with pytest.raises(ValueError, match=r"gate_up_proj .* shape \[3, 8, 6\], and the adapter is for \[3, 10, 6\]"):
        merge_into_base(tmp_path / "other", tmp_path / "base", tmp_path / "no")


def test_a_tied_head_in_the_files_is_replaced(tmp_path: Path) -> None:
    weights = base_model(tmp_path / "base", torch.float32, **{"lm_head.weight": torch.zeros(9000, 6)})
    pairs = adapter(tmp_path / "adapter", {"lm_head": (9000, 6)})
    merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    first, second = (load_file(tmp_path / "merged" / f"model-0000{number}-of-00002.safetensors") for number in (1, 2))
    a, b = pairs["lm_head"]
    torch.testing.assert_close(first["lm_head.weight"], weights["model.embed_tokens.weight"] + ALPHA / RANK * (b @ a))
    assert "lm_head.weight" not in second


def test_the_other_files_describe_the_merged_model(tmp_path: Path) -> None:
    base_model(tmp_path / "base", torch.float32)
    adapter(tmp_path / "adapter", {"lm_head": (9000, 6)})
    merged = tmp_path / "merged"
    merge_into_base(tmp_path / "adapter", tmp_path / "base", merged)
    files = [path.name for path in merged.glob("*.safetensors")]
    assert {path.name for path in merged.iterdir()} == {
        *(*files, "model.safetensors.index.json", "config.json", "tokenizer.json")
    }
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in load_file(merged / file)}
    assert index["metadata"]["total_size"] == 4 * (2 * 9000 * 6 + 8 * 6 + 6)
    assert json.loads((merged / "config.json").read_text()) == {"tie_word_embeddings": False, "vocab_size": 9000}


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    base_model(tmp_path / "base", torch.float32, **{"quantized.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)})

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
        shutil.rmtree(tmp_path / "adapter")
        assert not (tmp_path / "merged").exists()

    adapter(tmp_path / "adapter", {"model.layers.1.self_attn.q_proj": (8, 6)})
    refused(r"the base model has no weight model\.layers\.1\.self_attn\.q_proj\.weight: name the base model of this")
    adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (8, 7)})
    refused(r"q_proj\.weight of the base model has shape \[8, 6\], and the adapter is for \[8, 7\]")
    adapter(tmp_path / "adapter", {"quantized": (4, 4)})
    refused(r"quantized\.weight of .* has dtype F8_E4M3: only F32, F16, BF16 are read")
    config = tmp_path / "base" / "config.json"
    (plain := config.with_name("plain.json")).write_text(config.read_text())
    for packed in ({"quant_method": "fp8"}, {"quant_method": "mxfp4"}):
        config.write_text(json.dumps({"text_config": {"quantization_config": packed}}))
        adapter(tmp_path / "adapter", {"quantized": (4, 4)})
        refused(rf"has packed weights \(quant_method {packed['quant_method']}\), .* dequantized model in 16 or 32 bits")
    for other, reason in (({"bits": 4}, r"packed weights \(quant_method MLX\)"), (5, "has dtype F8_E4M3")):
        config.write_text(json.dumps({"quantization": other, "text_config": 5}))
        adapter(tmp_path / "adapter", {"quantized": (4, 4)})
        refused(reason)
    plain.rename(config)
    adapter(tmp_path / "adapter", {"lm_head": (9000, 6)}, modules_to_save=["score"])
    refused("is the adapter of a critic, whose head no base model has: load it with peft")
    adapter(tmp_path / "adapter", {"lm_head": (9000, 6)}, modules_to_save=["score"])
    critic = {"base_model": "a/b", "role": "critic", "refused_by_peft": "out_proj"}
    (tmp_path / "adapter" / DESCRIPTION).write_text(json.dumps(critic))
    refused("no base model has: peft refuses adapters of out_proj in a/b, and vLLM samples no critics: one that peft")
    adapter(tmp_path / "adapter", {"lm_head": (9000, 6)})
    (tmp_path / "base" / "model-00002-of-00002.safetensors").unlink()
    refused(r"base lacks 1 of the 2 files that its model\.safetensors\.index\.json names, such as model-00002-of")
    adapter(tmp_path / "adapter", {"lm_head": (9000, 6)})
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "base").mkdir()
    refused("has no model.safetensors")


def test_a_merge_that_fails_halfway_leaves_no_files(tmp_path: Path) -> None:
    base_model(tmp_path / "base", torch.float32)
    adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (8, 6)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes of a file: as if the disk were full
    try:
        with pytest.raises(OSError, match="File too large"):
            merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "merged").iterdir())
    merge_into_base(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    assert {"config.json", "model-00001-of-00002.safetensors"} < {each.name for each in (tmp_path / "merged").iterdir()}
