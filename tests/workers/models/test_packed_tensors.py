"""Releases in fewer bits load as the numbers that they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.models.packed_tensors import dequantized_tensors, dequantizing
from trainhouse.workers.planner.footprint import loaded_bytes
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.model_shape import refusal_of
from trainhouse.workers.shapes.packed_weights import METHODS, Quantization
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils.quantization_config import Mxfp4Config

from ...tiny import tiny_model
from ..parallel.live_bytes import LiveBytes
from .releases import RELEASES, float8_codes, some_scales
from .test_survey import image_model

# Blocks of 128 end within matrices, and those of other layouts with them.
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}
EXPERTS = SHAPE | {"moe_intermediate_size": 160}


def a_config(directory: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(directory)), threads=1, device="cpu", dtype=dtype)


def written(layout: str, directory: Path, kind: str = "qwen3_moe") -> tuple[Path, Path]:
    """Returns a release in this layout, and one that holds its numbers unpacked."""
    model = tiny_model(kind, directory / "model", **(EXPERTS if kind == "qwen3_moe" else SHAPE))
    RELEASES[layout].write(model, directory / "packed", directory / "plain")
    return directory / "packed", directory / "plain"


def parameters(directory: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, Tensor]:
    return BaseModel(a_config(directory, dtype)).own_parameters()


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def shift_scales(release: Path) -> None:
    """Gives each block of the weights that have several blocks its neighbour's scale."""
    weights = load_file(release / "model.safetensors")
    for name, scales in weights.items():
        if name.endswith(("_scale", "_scales", "_scale_inv")) and scales.numel() > 1:
            weights[name] = scales.flatten().float().roll(1).view(scales.shape).to(scales.dtype)
    save_file(weights, release / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", RELEASES)
def test_a_release_loads_as_the_numbers_it_stands_for(layout: str, tmp_path: Path) -> None:
    packed, plain = written(layout, tmp_path)
    ours, theirs = parameters(packed), parameters(plain)
    assert same(ours, theirs) and len({each.dtype for each in ours.values()}) == 1
    assert same(parameters(packed, "bfloat16"), parameters(plain, "bfloat16"))
    if layout != "FP8 by matrices":
        shift_scales(packed)
        assert not same(parameters(packed), theirs)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "phi3"])
def test_other_families_load_too(kind: str, tmp_path: Path) -> None:
    packed, plain = written("NVFP4 of ModelOpt", tmp_path, kind)
    assert same(parameters(packed), parameters(plain))


def test_text_part_of_an_image_model_loads(tmp_path: Path) -> None:
    """The whole model's config says how its text part is packed."""
    image_model().save_pretrained(tmp_path / "model")
    RELEASES["Kimi's INT4"].write(tmp_path / "model", tmp_path / "packed", tmp_path / "plain")
    assert same(parameters(tmp_path / "packed"), parameters(tmp_path / "plain"))


def test_fp8_equals_transformers_dequantized_model(tmp_path: Path) -> None:
    # transformers needs whole blocks.
    whole = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2}
    model = tiny_model("qwen3", tmp_path / "model", **whole)
    RELEASES["DeepSeek's FP8"].write(model, tmp_path / "packed", tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert same(parameters(tmp_path / "packed"), dict(theirs.named_parameters()))


def test_mxfp4_experts_of_gpt_oss_equal_transformers_dequantized_model(tmp_path: Path) -> None:
    directory = mxfp4_release(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert same(loaded_by_transformers(directory), dict(theirs.named_parameters()))
    shift_scales(directory)
    assert not same(loaded_by_transformers(directory), dict(theirs.named_parameters()))


def mxfp4_release(directory: Path) -> Path:
    """Returns a gpt-oss model whose experts are random codes with random scales, two codes in a byte."""
    tiny_model("gpt_oss", directory, **EXPERTS)
    weights = load_file(directory / "model.safetensors")
    for name in [each for each in weights if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, rows, columns = weights.pop(name).shape
        blocks = (num_experts, columns, rows // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(115, 124, blocks, dtype=torch.uint8)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return directory


def loaded_by_transformers(directory: Path) -> dict[str, Tensor]:
    config = AutoConfig.from_pretrained(directory)
    with dequantizing(config, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    return dict(model.named_parameters())


def test_numbers_equal_those_of_compressed_tensors() -> None:
    """The library's version 0.20.0 packed and unpacked the tensors in the file."""
    cases: dict[str, Any] = json.loads((Path(__file__).parent / "compressed_tensors.json").read_text())
    assert len(cases) == 6
    for layout, case in cases.items():
        stored = {name: tensor_of(each["bytes"], each["dtype"], each["shape"]) for name, each in case["stored"].items()}
        (ours,) = read(stored, Quantization.of({"quantization_config": case["config"]})).values()
        assert torch.equal(ours, tensor_of(case["bfloat16"], "bfloat16", list(ours.shape))), layout


def tensor_of(content: str, dtype: str, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(content), dtype=getattr(torch, dtype)).view(shape)


class Stored:
    """A tensor as safetensors' slices are, which counts the numbers that are read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.num_read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPES[self._tensor.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        part = self._tensor[index]
        self.num_read += part.numel()
        return part


DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def read(stored: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Tensor]:
    slices = {name: Stored(tensor) for name, tensor in stored.items()}
    return {name: each[...] for name, each in dequantized_tensors(slices, quantization, torch.bfloat16).items()}


@pytest.mark.parametrize("layout", RELEASES)
def test_any_part_equals_that_of_the_whole_and_only_its_codes_are_read(layout: str) -> None:
    release, shape = RELEASES[layout], (150, 192)
    tensors, numbers = release.pack("a.b_proj.weight", shape)
    stored = {name: Stored(tensor) for name, tensor in tensors.items()}
    config = Quantization.of({"quantization_config": release.config})
    (weight,) = dequantized_tensors(stored, config, torch.float32).values()
    assert tuple(weight.get_shape()) == shape
    codes = stored.get("a.b_proj.weight_packed") or stored["a.b_proj.weight"]
    numbers_per_code = numbers.numel() // codes[...].numel()
    for part in [(slice(40, 140), slice(33, 97)), (slice(149, 150),), (slice(0, 75), slice(None))]:
        codes.num_read = 0
        assert torch.equal(weight[part], numbers[part])
        # Up to an element with several codes at both ends of a row.
        most = numbers[part].numel() + 16 * numbers[part].shape[0]
        assert codes.num_read * numbers_per_code <= most


def test_parts_of_a_stack_equal_those_of_the_whole(tmp_path: Path) -> None:
    stored = load_file(mxfp4_release(tmp_path) / "model.safetensors")
    config = Quantization("mxfp4")
    weights = dequantized_tensors({name: Stored(each) for name, each in stored.items()}, config, torch.float32)
    weight = weights["model.layers.0.mlp.experts.gate_up_proj"]
    whole = weight[...]
    assert whole.shape == tuple(weight.get_shape()) == (4, 192, 640)
    for part in [(slice(1, 3), slice(20, 90), slice(5, 500)), (slice(3, 4),), (slice(0, 4), slice(0, 96))]:
        assert torch.equal(weight[part], whole[part])


@pytest.mark.parametrize("scales", [(), (3,), (3, 8), (3, 8, 1), (3, 1, 1), (3, 2, 1, 4, 1)])
def test_scales_of_a_stack_can_lack_dimensions(scales: tuple[int, ...]) -> None:
    codes, factors = torch.randn(3, 8, 16).to(torch.float8_e4m3fn), some_scales(*scales)
    across, along = (2, 4) if len(scales) == 5 else (scales[1] if len(scales) > 1 else 1, 1)
    grid = factors.reshape(-1, across, along).repeat_interleave(8 // across, 1).repeat_interleave(16 // along, 2)
    stored = {"a.gate_up_proj": Stored(codes), "a.gate_up_proj_scale": Stored(factors)}
    (weight,) = dequantized_tensors(stored, Quantization(), torch.float32).values()
    assert torch.equal(weight[...], codes.float() * grid)
    assert torch.equal(weight[1:3, 3:7, 5:9], (codes.float() * grid)[1:3, 3:7, 5:9])


def test_reading_takes_little_more_memory_than_the_numbers() -> None:
    stored = {"a.weight": Stored(float8_codes((2048, 2048))), "a.weight_scale_inv": Stored(some_scales(16, 16))}
    (weight,) = dequantized_tensors(stored, Quantization("fp8"), torch.bfloat16).values()
    with LiveBytes() as memory:
        out = weight[...]
    assert out.nbytes < memory.peak < 1.5 * out.nbytes


def test_releases_of_modelopt_that_say_so_in_another_file_load(tmp_path: Path) -> None:
    packed, plain = written("NVFP4 of ModelOpt", tmp_path)
    (packed / "config.json").write_text((plain / "config.json").read_text())
    assert same(parameters(packed), parameters(plain))


def test_a_released_base_is_one_of_the_numbers_it_stands_for(tmp_path: Path) -> None:
    packed, plain = written("Kimi's INT4", tmp_path)
    base = BaseModel(a_config(packed))
    assert not hasattr(base.config, "quantization_config") and not base.is_quantized
    assert loaded_bytes(a_config(packed)) == loaded_bytes(a_config(plain)) == base.num_bytes
    assert loaded_bytes(a_config(packed, "bfloat16")) == base.num_bytes // 2


@pytest.mark.parametrize("layout", RELEASES)
def test_the_memory_of_a_release_is_planned_for_its_numbers(layout: str, tmp_path: Path) -> None:
    packed, plain = written(layout, tmp_path, "llama")
    assert loaded_bytes(a_config(packed)) == loaded_bytes(a_config(plain))


def test_the_memory_of_mxfp4_experts_is_planned_for_their_numbers(tmp_path: Path) -> None:
    expected = loaded_bytes(a_config(tiny_model("gpt_oss", tmp_path / "plain", **EXPERTS)))
    assert loaded_bytes(a_config(mxfp4_release(tmp_path / "packed"))) == expected


UNREADABLE: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scales": ({"a.weight": float8_codes((4, 4))}, "a.weight is packed as F8_E4M3, without scales that are known"),
    "no scales of integers": ({"a.weight_packed": torch.ones(4, 4, dtype=torch.int32)}, "download the model again"),
    "another order": (
        {"a.weight": torch.ones(4, 4, dtype=torch.uint8), "a.weight_scale": some_scales(4, 1)},
        "a.weight has codes of 4 bits in an order that is not known",
    ),
    "odd scales": (
        {"a.weight": float8_codes((5, 4)), "a.weight_scale": some_scales(2, 4)},
        "a.weight of 5 x 4 has 2 x 4 scales",
    ),
    "scaled inputs": (
        {"a.weight": float8_codes((4, 4)), "a.weight_scale": some_scales(1), "a.pre_quant_scale": some_scales(4)},
        "a needs pre_quant_scale to be dequantized",
    ),
    "3 bits": (
        {"a.weight_packed": torch.ones(4, 3, dtype=torch.int32), "a.weight_scale": some_scales(4, 1)},
        r"codes of \(\(3, 32\),\) \(bits, group\) cannot be read",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_would_be_read_as_wrong_numbers_is_refused(case: str) -> None:
    stored, reason = UNREADABLE[case]
    with pytest.raises(ValueError, match=reason):
        read(stored, Quantization("compressed-tensors", integers=((3, 32),)))


def test_methods_are_refused_by_config_if_their_layout_is_not_known() -> None:
    for method in METHODS:
        assert refusal_of({"model_type": "llama", "quantization_config": {"quant_method": method}}) is None
    for method in ("gptq", "awq", "bitsandbytes"):
        refusal = refusal_of({"model_type": "llama", "quantization_config": {"quant_method": method}})
        assert refusal is not None and refusal.startswith(f"weights quantized by {method} are not supported")
