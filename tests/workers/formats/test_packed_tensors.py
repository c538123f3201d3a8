"""Releases in fewer bits load as the numbers that they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.workers.formats.rows import METHODS
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.models.stored.stored_tensor import dequantized_tensors, dequantizing
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.footprint import loaded_bytes
from trainhouse.workers.shapes.model_shape import refusal_of
from trainhouse.workers.shapes.packed_format import Grouping, Quantization
from trainhouse.workers.shapes.quantization import read_quantization
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils.quantization_config import Mxfp4Config

from ...tiny import tiny_model
from ..models.test_survey import image_model
from ..parallel.live_bytes import LiveBytes
from .releases import RELEASES, Bits4, Gptq, bit_string, compressed, float8_codes, some_scales
from .releases import integers as packed_integers

# Blocks of 128 end within matrices, and those of other layouts with them.
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}
EXPERTS = SHAPE | {"moe_intermediate_size": 160}
WITH_ONE_SCALE = ("FP8 by matrices", "Quark's FP8")
# Layouts that differ from another one in what other tests show.
VARIANTS = {
    *("MXFP8 of transformers", "INT8 in bytes", "GPTQ in 2 bits", "GPTQ in 8 bits", "GPTQ in 3 bits, version 2"),
    *("AutoRound", "AutoRound without a packing format", "AutoRound, its own zero points", "AutoRound as AWQ"),
    *("bitsandbytes FP4", "bitsandbytes NF4 in numbers", "torchao INT8", "Quark's FP8", "Quark's MXFP4"),
}
# Consecutive numbers share their scales there, so that whole rows are read.
BY_ROWS = ("bitsandbytes NF4", "bitsandbytes FP4", "bitsandbytes NF4 in numbers")


def a_config(directory: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(directory)), threads=1, device="cpu", dtype=dtype)


def written(layout: str, directory: Path, kind: str = "qwen3_moe") -> tuple[Path, Path]:
    """Returns a release in this layout, and one that holds its numbers unpacked."""
    model = tiny_model(kind, directory / "model", **(EXPERTS if kind == "qwen3_moe" else SHAPE))
    RELEASES[layout].write(model, directory / "packed", directory / "plain")
    return directory / "packed", directory / "plain"


def parameters(directory: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, Tensor]:
    return BaseModel(a_config(directory, dtype)).weights.own_parameters()


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def shift_scales(release: Path) -> None:
    """Gives each block of the weights that have several blocks its neighbour's scale."""
    weights = load_file(release / "model.safetensors")
    for name, scales in weights.items():
        if name.endswith(("_scale", "scales", "_scale_inv", ".SCB", ".absmax")) and scales.numel() > 1:
            weights[name] = scales.flatten().float().roll(1).view(scales.shape).to(scales.dtype)
    save_file(weights, release / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.full) if each in VARIANTS else each for each in RELEASES]
)
def test_a_release_loads_as_the_numbers_it_stands_for(layout: str, tmp_path: Path) -> None:
    packed, plain = written(layout, tmp_path)
    ours, theirs = parameters(packed), parameters(plain)
    assert same(ours, theirs) and len({each.dtype for each in ours.values()}) == 1
    assert same(parameters(packed, "bfloat16"), parameters(plain, "bfloat16"))
    if layout not in WITH_ONE_SCALE:
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


def test_unpacked_files_of_mlx_are_read_only_of_types_with_the_same_numbers(tmp_path: Path) -> None:
    """mlx-lm adds one to norms of others, and config.json does not say so."""
    taken, refused = tiny_model("qwen3", tmp_path / "taken"), tiny_model("qwen3_next", tmp_path / "refused")
    before = parameters(taken)
    parameters(refused)
    for file in (*taken.glob("*.safetensors"), *refused.glob("*.safetensors")):
        save_file(load_file(file), file, {"format": "mlx"})
    assert same(parameters(taken), before)
    with pytest.raises(ValueError, match=r"model\.safetensors: qwen3_next models in MLX's files are not supported"):
        parameters(refused)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    (file,) = tiny_model("qwen3", tmp_path / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{file} is damaged: it is shorter than its header says"):
        parameters(tmp_path / "model")


def loaded_by_transformers(directory: Path) -> dict[str, Tensor]:
    config = AutoConfig.from_pretrained(directory)
    with dequantizing(config, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    return dict(model.named_parameters())


# file -> its number of cases
PACKED_BY_LIBRARIES = {
    "compressed_tensors.json": 7,
    "gptq_and_awq.json": 5,
}


@pytest.mark.parametrize("file", PACKED_BY_LIBRARIES)
def test_numbers_equal_those_of_the_library_of_the_format(file: str) -> None:
    """The tensors are of compressed-tensors 0.20.0, which packed and unpacked them; of AutoRound 0.16.1, which packed
    numbers; and of AutoAWQ 0.2.9, which unpacked random codes.
    """
    cases: dict[str, Any] = json.loads((Path(__file__).parent / file).read_text())
    assert len(cases) == PACKED_BY_LIBRARIES[file]
    for layout, case in cases.items():
        stored = {name: tensor_of(each["bytes"], each["dtype"], each["shape"]) for name, each in case["stored"].items()}
        (ours,) = read(stored, read_quantization({"quantization_config": case["config"]})).values()
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
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def read(stored: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Tensor]:
    """Returns whole weights in bfloat16."""
    slices = {name: Stored(tensor) for name, tensor in stored.items()}
    return {name: each[...] for name, each in dequantized_tensors(slices, quantization, torch.bfloat16).items()}


@pytest.mark.parametrize("layout", RELEASES)
def test_any_part_equals_that_of_the_whole_and_only_its_codes_are_read(layout: str) -> None:
    release, shape = RELEASES[layout], (160, 192)
    tensors, numbers = release.pack("a.b_proj.weight", shape)
    stored = {name: Stored(tensor) for name, tensor in tensors.items()}
    config = read_quantization({"quantization_config": release.config})
    (weight,) = dequantized_tensors(stored, config, torch.float32).values()
    assert tuple(weight.get_shape()) == shape
    codes = next(stored[name] for name in CODES if name in stored)
    numbers_per_code = numbers.numel() / codes[...].numel()
    for part in [(slice(40, 140), slice(33, 97)), (slice(149, 150),), (slice(0, 75), slice(None))]:
        codes.num_read = 0
        assert torch.equal(weight[part], numbers[part])
        num_rows, num_columns = numbers[part].shape
        # Up to as many numbers as share elements at both ends of a row or a column.
        most = (num_rows + 16) * 192 if layout in BY_ROWS else (num_rows + 14) * (num_columns + 62)
        assert codes.num_read * numbers_per_code <= most


CODES = [
    "a.b_proj.weight_packed",
    "a.b_proj.weight",
    "a.b_proj.qweight",
    "a.b_proj._weight_qdata",
]


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
    assert not hasattr(base.config, "quantization_config") and not base.weights.is_quantized
    assert loaded_bytes(a_config(packed)) == loaded_bytes(a_config(plain)) == base.weights.num_bytes
    assert loaded_bytes(a_config(packed, "bfloat16")) == base.weights.num_bytes // 2


@pytest.mark.parametrize("layout", RELEASES)
def test_the_memory_of_a_release_is_planned_for_its_numbers(layout: str, tmp_path: Path) -> None:
    packed, plain = written(layout, tmp_path, "llama")
    assert loaded_bytes(a_config(packed)) == loaded_bytes(a_config(plain))


def test_the_memory_of_mxfp4_experts_is_planned_for_their_numbers(tmp_path: Path) -> None:
    expected = loaded_bytes(a_config(tiny_model("gpt_oss", tmp_path / "plain", **EXPERTS)))
    assert loaded_bytes(a_config(mxfp4_release(tmp_path / "packed"))) == expected


def by_path(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {f"a.{leaf}": each for leaf, each in tensors.items()}


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
@pytest.mark.parametrize("other", [(), (4,), (2, 3, 5), (4, 1, 1, 1)])
def test_codes_and_scales_of_too_few_or_too_many_dimensions_are_refused_by_name(
    shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    scales, words = torch.ones(other), torch.ones(shape).int()
    of_float8 = {"a.weight": torch.ones(shape).to(torch.float8_e4m3fn), "a.weight_scale": scales}
    of_bytes = {"a.weight_packed": torch.ones(shape).byte(), "a.weight_scale": scales}
    of_words = {"a.weight_packed": words, "a.weight_scale": scales}
    of_torchao = {"a._weight_qdata": torch.ones(shape).char(), "a._weight_scale": scales}
    of_gpt_oss = {"a.up_blocks": torch.ones(shape).byte(), "a.up_scales": scales.byte()}
    groupings = (Grouping(4, 32),)
    for stored in (of_float8, of_bytes, of_words, of_torchao, of_gpt_oss):
        with pytest.raises(ValueError, match=r"a\.\S+ of \w+ \S+"):
            read(stored, Quantization("compressed-tensors", groupings=groupings))


@pytest.mark.parametrize("other", [(0,), (2, 3, 5), (5, 1, 1), (4, 1, 1, 1, 2)])
def test_scales_of_other_dimensions_than_a_weight_are_refused_by_name(other: tuple[int, ...]) -> None:
    stored = {"a.weight": float8_codes((4, 4)), "a.weight_scale": torch.ones(other)}
    with pytest.raises(ValueError, match=r"a\.weight of (F8_E4M3 )?4 x 4"):
        read(stored, Quantization("fp8"))


def test_bits_of_a_weight_are_those_of_the_group_that_names_it() -> None:
    """Sizes of tensors fit both where a row has one scale."""
    torch.manual_seed(0)
    pairs = {"a.q_proj": ({"num_bits": 4}, ["Linear"]), "a.down_proj": ({"num_bits": 8}, ["re:.*down_proj"])}
    groups: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for path, (weights, targets) in pairs.items():
        bits = weights["num_bits"]
        codes, scales = torch.randint(-(1 << bits - 1), 1 << bits - 1, (4, 32)), some_scales(4, 1).bfloat16()
        stored |= {f"{path}.weight_packed": packed_integers(codes, bits), f"{path}.weight_scale": scales}
        numbers[f"{path}.weight"] = (codes * scales.float()).bfloat16()
        groups[path] = {"targets": targets, "weights": weights | {"type": "int", "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert same(read(stored, read_quantization({"quantization_config": config})), numbers)
    groups["a.down_proj"]["targets"] = ["Linear"]
    with pytest.raises(ValueError, match=r"a\.q_proj: 4 integers with 1 scales in a row fit 2 of .* 8 bits"):
        read(stored, read_quantization({"quantization_config": config}))


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
    "other groups": (
        {"a.weight_packed": torch.ones(4, 3, dtype=torch.int32), "a.weight_scale": some_scales(4, 2)},
        "a: 3 integers with 2 scales in a row fit 0 of what quantization_config says, 3 bits in groups of 32",
    ),
    "sparse": ({"a.bitmask": torch.ones(4, 1).byte()}, r"a\.bitmask: weights packed by .* by compressed-tensors 0\.12"),
    "HQQ": ({"a.W_q": torch.ones(4, 4).byte()}, r"a\.W_q: weights packed by hqq .* by hqq \(HQQLinear\.dequantize\)"),
    "torchao INT4": (
        {"a._weight_qdata": torch.ones(4, 4).char(), "a._weight_scale": torch.ones(1, 4)}
        | {"a._weight_zero_point": torch.ones(1, 4).bfloat16()},
        r"a\._weight_qdata: weights packed by torchao INT4 .* pack the original model in INT8 by torchao",
    ),
    "MLX without its config": (
        {"a.weight": torch.ones(4, 4).int(), "a.scales": torch.ones(4, 1)},
        "a.weight is packed as I32, without scales that are known",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_would_be_read_as_wrong_numbers_is_refused(case: str) -> None:
    stored, reason = UNREADABLE[case]
    with pytest.raises(ValueError, match=reason):
        read(stored, Quantization("compressed-tensors", groupings=(Grouping(3, 32),)))


def test_weights_of_another_size_than_the_config_says_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = written("GPTQ", tmp_path, "llama")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    reason = r"6 weights do not fit its config\.json, such as .*mlp\.down_proj\.weight of \[192, 320\], .* \[192, 256\]"
    with pytest.raises(ValueError, match=reason):
        parameters(packed)


def refusal(**config: object) -> str:
    return refusal_of({"model_type": "llama", "quantization_config": config}) or ""


OTHERS = ("quanto", "bitnet", "gemma", "fouroversix", "nvfp4")


def test_methods_are_refused_by_config_if_their_layout_is_not_known() -> None:
    for method in METHODS:
        assert not refusal(quant_method=method)
    for method in ("aqlm", "vptq", "spqr", "higgs", "quip", "eetq", "fp_quant", "sinq", *OTHERS, "a new one"):
        assert refusal(quant_method=method).startswith(f"weights quantized by {method} are not supported")
    assert "a new one are not supported, only by mxfp4, mxfp8, fp8, " in refusal(quant_method="a new one")
    assert "because its layers also round inputs to 8 bits" in refusal(quant_method="bitnet")
    assert "trained codebooks, which its own program decodes: use a release in bfloat16" in refusal(quant_method="vptq")


def test_what_another_program_converts_is_refused_with_its_name() -> None:
    mlx: dict[str, object] = {"group_size": 64, "bits": 4}
    assert "`mlx_lm.convert --dequantize`" in refusal(**mlx)
    assert "`mlx_lm.convert --dequantize`" in (refusal_of({"model_type": "llama", "quantization": mlx}) or "")
    others = refusal_of({"model_type": "qwen3_moe", "quantization": mlx}) or ""
    assert others.startswith("qwen3_moe models in MLX's files are not supported, because these have other names")
    assert "MetalConfig(dequantize=True)" in refusal(quant_method="metal")
    assert "HQQLinear.dequantize" in refusal(quant_method="hqq")
    for layout in ("sparse-24-bitmask", "sparse-bitmask"):
        sparse: dict[str, object] = {"quant_method": "compressed-tensors", "sparsity_config": {"format": layout}}
        assert "by compressed-tensors 0.12" in refusal(**sparse)
    assert not refusal(quant_method="compressed-tensors", sparsity_config={"format": "dense"})


INT4 = {"num_bits": 4, "type": "int"}


WRONG: dict[str, tuple[Mapping[str, object], str]] = {
    "bits": ({"quant_method": "gptq", "bits": 99}, "quantization_config has bits 99"),
    "bits of AWQ": ({"quant_method": "awq", "bits": 3}, "quantization_config has bits 3"),
    "bits in words": ({"quant_method": "gptq", "bits": "4"}, "quantization_config has bits '4'"),
    "no group": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "has group_size 0, which must be at least 1"),
    "negative group": ({"quant_method": "awq", "bits": 4, "group_size": -2}, "has group_size -2"),
    "packing": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "packing of AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has version 'gemv', supported is gemm"),
    "packing of AutoRound": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "other:gptq"},
        "has packing_format 'other:gptq', supported is auto_round, auto_round:auto_gptq",
    ),
    "unknown packing of AutoRound": (
        {"quant_method": "intel/auto-round", "bits": 4, "packing_format": "auto_round:mlx"},
        "has packing_format 'auto_round:mlx'",
    ),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "has weight_block_size 0"),
    "one side": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size [128], which must be two"),
    "bits of a group": (
        compressed("pack-quantized", num_bits=99, type="int", group_size=32),
        "quantization_config has num_bits 99",
    ),
    "group of a group": (compressed("pack-quantized", **INT4, group_size=0), "quantization_config has group_size 0"),
    "sparse": (compressed("marlin-24", **INT4), "weights packed as marlin-24 are not supported"),
    "sparse beside": (
        compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "marlin-24"}},
        "weights packed as marlin-24 are not supported",
    ),
    "rotated": (
        compressed("pack-quantized", **INT4) | {"transform_config": {"config_groups": {"R1": {}}}},
        "weights in a rotated basis (transform_config) are not supported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_with_their_value(case: str) -> None:
    config, reason = WRONG[case]
    assert reason in refusal(**config)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_autoround_packs_as_gptq_if_its_config_does_not_say_how(method: str) -> None:
    def is_low(**packing: str | None) -> bool:
        config = {"quant_method": method, "bits": 4, "group_size": 32} | packing
        return read_quantization({"quantization_config": config}).low_zero_points

    assert is_low() and is_low(packing_format="auto") and is_low(packing_format=None)
    assert not is_low(packing_format="auto_round") and not is_low(packing_format="auto_round:gptqmodel")
    for packing in ("auto_round:llm_compressor", "auto_round:fp8", "auto_round:fp8_static"):
        assert not refusal(quant_method=method, packing_format=packing)


def broken_gptq(**changed: Tensor | None) -> dict[str, Tensor]:
    """Returns a weight of 64 x 64 in groups of 32, with these tensors instead of its own, or without them."""
    torch.manual_seed(0)
    tensors, _ = Gptq(4)("a.weight", (64, 64))
    return {name: each for name, each in (tensors | by_path(changed)).items() if each is not None}


def broken_nf4(numbers_of: int = 64, **changed: object) -> dict[str, Tensor]:
    """Returns a weight of 64 x 64 whose state has these values, or no weight but 64 x `numbers_of` numbers' codes."""
    tensors, _ = Bits4("nf4")("a.weight", (64, 64))
    name = "a.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | changed
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {"a.weight": tensors["a.weight"][: 32 * numbers_of]}


def int8_in_layout(layout: Tensor) -> dict[str, Tensor]:
    """Returns a weight of 64 x 64 by bitsandbytes whose tensor of the layout is this."""
    tensors, _ = RELEASES["bitsandbytes INT8"].pack("a.weight", (64, 64))
    return tensors | {"a.weight_format": layout}


def empty_fp8(rows: int, columns: int) -> dict[str, Tensor]:
    return {"a.weight": float8_codes((rows, columns)), "a.weight_scale": torch.tensor(1.0)}


BROKEN: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scales": (broken_gptq(scales=None), r"a\.qweight has no a\.scales: download the model again"),
    "no zero points": (broken_gptq(qzeros=None), r"a\.qweight has no a\.qzeros"),
    "other scales": (
        broken_gptq(scales=some_scales(2, 63)),
        r"do not fit together: a\.qweight of I32 8 x 64, a\.scales of F32 2 x 63, a\.qzeros of I32 2 x 8: download",
    ),
    "no groups": (broken_gptq(scales=torch.ones(0, 64), qzeros=torch.ones(0, 8).int()), "64 x 64 has 64 x 0 scales"),
    "three dimensions": (broken_gptq(qweight=torch.ones(1, 8, 64).int()), "do not fit together"),
    "short order": (broken_gptq(g_idx=torch.zeros(63).int()), r"do not fit together: a\.qweight .* a\.g_idx of I32 63"),
    "order in floats": (broken_gptq(g_idx=torch.zeros(64).to(torch.float8_e4m3fn)), r"a\.g_idx of F8_E4M3 64"),
    "zero points in floats": (broken_gptq(qzeros=torch.zeros(2, 8)), r"a\.qzeros of F32 2 x 8"),
    "words in bytes": (
        {"a.weight_packed": torch.ones(64, 8).char(), "a.weight_scale": some_scales(64, 2)},
        r"a\.weight_packed of I8 64 x 8, a\.weight_scale",
    ),
    "other order": (broken_gptq(g_idx=torch.full((64,), 2).int()), r"a\.g_idx has group 2, but a\.weight has groups 0"),
    "scales of nothing": ({"a.weight": torch.ones(4, 4), "a.scales": torch.ones(4)}, "belong to no packed weight"),
    "other integers": ({"a.weight": torch.ones(4, 4).int()}, r"a\.weight is packed as I32, without scales"),
    "scaled inputs": (
        {"a._weight_qdata": torch.ones(4, 4).char(), "a._weight_scale": some_scales(4, 1)}
        | {"a._weight_act_pre_scale": some_scales(4)},
        "a needs _weight_act_pre_scale",
    ),
    "tiles of a GPU": ({"a._weight_qdata": torch.ones(2, 2, 2, 2).int()}, "is packed as I32 of 2 x 2 x 2 x 2"),
    "col32": (int8_in_layout(torch.tensor(1)), r"a\.weight_format is 1, .* save the model again with a current"),
    "turing": (int8_in_layout(torch.tensor([2], dtype=torch.uint8)), r"a\.weight_format is 2"),
    "ampere": (int8_in_layout(torch.tensor(3, dtype=torch.uint8)), r"a\.weight_format is 3"),
    "no layout": (int8_in_layout(torch.ones(0)), r"a\.weight_format is empty"),
    "several layouts": (int8_in_layout(torch.zeros(9)), r"a\.weight_format is 0\.0, 0\.0"),
    "no inputs": (
        broken_gptq(qweight=torch.ones(0, 64).int(), g_idx=None),
        r"a\.qweight of I32 0 x 64 has no numbers: download the model again",
    ),
    "no outputs": (
        broken_gptq(qweight=torch.ones(8, 0).int(), scales=torch.ones(2, 0), qzeros=torch.ones(2, 0).int()),
        r"a\.qweight of I32 8 x 0",
    ),
    "no rows": (empty_fp8(0, 4), r"a\.weight of F8_E4M3 0 x 4 has no numbers"),
    "no columns": (empty_fp8(4, 0), r"a\.weight of F8_E4M3 4 x 0 has no numbers"),
    "no rows of torchao": (
        {"a._weight_qdata": torch.ones(0, 4).char(), "a._weight_scale": some_scales(1)},
        r"a\._weight_qdata of I8 0 x 4 has no numbers",
    ),
    "no experts": (
        {"a.up_blocks": torch.ones(0, 4, 2, 16).byte(), "a.up_scales": torch.ones(0, 4, 2).byte()},
        r"a\.up_blocks of U8 0 x 4 x 2 x 16 has no numbers",
    ),
    "no state": ({"a.weight": float8_codes((4, 1)), "a.weight.absmax": torch.ones(1)}, "a.weight has no quant_state"),
    "shape": (broken_nf4(shape=[64, 1 << 40]), r"has shape \[64, 1099511627776\], but its codes are 4096 numbers"),
    "negative shape": (broken_nf4(shape=[-64, -64]), r"has shape \[-64, -64\], but it must be at least 1"),
    "no shape": (broken_nf4(shape=None), "has shape None"),
    "short codes": (broken_nf4(numbers_of=60), "but its codes are 3840 numbers"),
    "codes in two columns": (
        (nf4 := broken_nf4()) | {"a.weight": nf4["a.weight"].view(1024, 2)},
        r"a\.weight of U8 1024 x 2, a\.weight\.quant_state",
    ),
    "state in numbers": (
        nf4 | {(state := "a.weight.quant_state.bitsandbytes__nf4"): nf4[state].float()},
        r"a\.weight\.quant_state\.bitsandbytes__nf4 of F32",
    ),
    "blocks": (broken_nf4(blocksize=0), "has blocksize 0, but it must be at least 1"),
    "other blocks": (broken_nf4(blocksize=128), r"a\.weight\.absmax has 64 numbers, but a\.weight needs 32"),
    "offset": (broken_nf4(nested_offset="x"), "has nested_offset x, but it must be a number"),
    "long state": (broken_nf4(more="x" * 5000), "bytes, more than 4096"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str) -> None:
    stored, reason = BROKEN[case]
    with pytest.raises(ValueError, match=reason):
        read(stored, read_quantization({"quantization_config": Gptq(4).config()}))


def test_zero_points_of_zero_borrow_from_the_next_as_they_were_written() -> None:
    """Files hold the integers of all zero points less one in each code."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 0, 7]])
    low = bit_string(zeros, 4) - 0x11111111
    stored = broken_gptq(qweight=torch.zeros(4, 8).int(), qzeros=low, scales=torch.ones(1, 8), g_idx=None)
    assert read(stored, Quantization(low_zero_points=True))["a.weight"].tolist() == (-zeros.T.expand(8, 32)).tolist()
