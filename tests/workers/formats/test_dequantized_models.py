"""Releases load as the numbers of the model that transformers dequantizes with the library of their format."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config
from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationConfigMixin

from ...tiny import tiny_model
from .releases import RELEASES
from .test_packed_tensors import parameters, same, shift_scales

# Rows of whole blocks, without which the CPU kernel of bitsandbytes takes wrong scales.
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def dequantized(directory: Path, dtype: torch.dtype, **options: QuantizationConfigMixin) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options)
    if not options:
        model.dequantize()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "nested"),
    [("nf4", True), *(pytest.param(*each, marks=pytest.mark.full) for each in [("nf4", False), ("fp4", True)])],
)
def test_4_bits_of_bitsandbytes_equal_transformers_dequantized_model(kind: str, nested: bool, tmp_path: Path) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    packed = saved(config, tmp_path)
    theirs = dequantized(packed, torch.float32)
    assert same(parameters(packed), theirs)
    assert same(parameters(packed, "bfloat16"), {name: each.bfloat16() for name, each in theirs.items()})
    shift_scales(packed)
    assert not same(parameters(packed), theirs)


def test_8_bits_of_bitsandbytes_equal_transformers_dequantized_model(tmp_path: Path) -> None:
    packed = saved(BitsAndBytesConfig(load_in_8bit=True), tmp_path)
    theirs = dequantized(packed, torch.float32)
    assert close(parameters(packed), theirs)
    shift_scales(packed)
    assert not close(parameters(packed), theirs)


def saved(config: BitsAndBytesConfig, directory: Path) -> Path:
    """Returns a model as transformers saves it in fewer bits."""
    plain = tiny_model("llama", directory / "plain", **SHAPE)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(directory / "packed")
    for file in plain.glob("*token*"):
        shutil.copy(file, directory / "packed")
    return directory / "packed"


def close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Up to roundings of float32: bitsandbytes multiplies twice, with the scale and with 1 / 127."""
    assert ours.keys() == theirs.keys()
    return all(torch.allclose(ours[name], theirs[name], rtol=3e-7, atol=0) for name in ours)


COMPRESSED = [
    layout
    for layout, release in RELEASES.items()
    # Version 0.20 ignores the order of activations.
    if release.config.get("quant_method") == "compressed-tensors" and layout != "INT4 in the order of activations"
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("layout", COMPRESSED)
def test_compressed_tensors_equal_transformers_dequantized_model(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = tiny_model("qwen3", tmp_path / "model", **SHAPE)
    RELEASES[layout].write(model, tmp_path / "packed", tmp_path / "plain")
    theirs = dequantized(
        tmp_path / "packed", torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert same(parameters(tmp_path / "packed", "bfloat16"), theirs)
    shift_scales(tmp_path / "packed")
    assert not same(parameters(tmp_path / "packed", "bfloat16"), theirs)


@pytest.mark.slow
def test_mxfp8_equals_transformers_dequantized_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model", **SHAPE)
    RELEASES["MXFP8 of transformers"].write(model, tmp_path / "packed", tmp_path / "plain")
    theirs = dequantized(tmp_path / "packed", torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert same(parameters(tmp_path / "packed"), theirs)
    shift_scales(tmp_path / "packed")
    assert not same(parameters(tmp_path / "packed"), theirs)
