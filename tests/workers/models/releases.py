"""Releases of tiny models in fewer bits: packs weights as their publishers do, and says what they then stand for.

Codes are drawn at random rather than rounded from a model's weights, so that every code occurs; scales are small enough
for a model with these weights to run.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Release:
    """A layout of packed weights.

    pack: from a weight's name and shape [rows, columns] to its tensors in files, and to its numbers as float32.
    """

    config: Mapping[str, Any]
    pack: Callable[[str, tuple[int, int]], tuple[Tensors, Tensor]]

    def write(self, model: Path, packed: Path, plain: Path, seed: int = 0) -> None:
        """Writes a model's linear layers with random codes into `packed`, and with their numbers into `plain`."""
        torch.manual_seed(seed)
        weights = load_file(model / "model.safetensors")
        stored, numbers = dict(weights), dict(weights)
        for name, weight in weights.items():
            if name.endswith("_proj.weight") or ".experts." in name:
                del stored[name]
                tensors, numbers[name] = self.pack(name, (weight.shape[0], weight.shape[1]))
                stored |= tensors
        config = json.loads((model / "config.json").read_text())
        for directory, tensors, extra in ((packed, stored, {"quantization_config": self.config}), (plain, numbers, {})):
            shutil.copytree(model, directory)
            (directory / "config.json").write_text(json.dumps(config | extra))
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def some_scales(*shape: int) -> Tensor:
    return 0.01 + 0.02 * torch.rand(shape)


def repeated(scales: Tensor, height: int, width: int, shape: tuple[int, int]) -> Tensor:
    """Returns each scale once for each number of its block."""
    return scales.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]


def blocks(size: int, of: int) -> int:
    return -(-size // of)


def float8_codes(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape).mul(2).to(torch.float8_e4m3fn)


def float4_codes(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns bytes of two codes each, the first in the lower half, and the codes' numbers."""
    codes = torch.randint(0, 16, shape)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), FLOAT4[codes]


def deepseek(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scales = float8_codes(shape), some_scales(blocks(shape[0], 128), blocks(shape[1], 128))
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * repeated(scales, 128, 128, shape)


def float8_rows(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scales = float8_codes(shape), some_scales(shape[0], 1).bfloat16()
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def mxfp8(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scales = float8_codes(shape), torch.randint(119, 123, (shape[0], shape[1] // 32), dtype=torch.uint8)
    return {name: codes, f"{name}_scale": scales}, codes.float() * 2.0 ** (repeated(scales, 1, 32, shape) - 127)


def float8_whole(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scale = float8_codes(shape), some_scales()
    beside = {name.replace(".weight", ".input_scale"): torch.tensor(0.1)}
    return {name: codes, f"{name}_scale": scale} | beside, codes.float() * scale


def kimi(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scales = torch.randint(-8, 8, shape), some_scales(shape[0], blocks(shape[1], 32)).bfloat16()
    whole = torch.tensor(shape, dtype=torch.int32)
    tensors = {f"{name}_packed": integers(codes, 4), f"{name}_scale": scales, f"{name}_shape": whole}
    return tensors, codes.float() * repeated(scales, 1, 32, shape)


def asymmetric(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """8 bits with zero points, which are packed along columns."""
    scales = some_scales(shape[0], shape[1] // 32) / 16
    codes, zeros = torch.randint(-128, 128, shape), torch.randint(-128, 128, scales.shape)
    packed_zeros = integers(zeros.T, 8).T.contiguous()
    tensors = {f"{name}_packed": integers(codes, 8), f"{name}_scale": scales, f"{name}_zero_point": packed_zeros}
    return tensors, (codes - repeated(zeros, 1, 32, shape)) * repeated(scales, 1, 32, shape)


def integers(codes: Tensor, bits: int) -> Tensor:
    """Packs signed codes into int32, the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes + (1 << (bits - 1)), (0, -codes.shape[1] % (32 // bits)))
    parts = padded.unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.int32)  # wraps around


def compressed_nvfp4(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, numbers = float4_codes(shape)
    scales, whole = (some_scales(shape[0], shape[1] // 16) * 5000).to(torch.float8_e4m3fn), torch.tensor([6000.0])
    tensors = {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": whole}
    return tensors, numbers * (repeated(scales, 1, 16, shape) / whole)


def modelopt_nvfp4(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, numbers = float4_codes(shape)
    scales, whole = (some_scales(shape[0], shape[1] // 16) * 5000).to(torch.float8_e4m3fn), torch.tensor(1.7e-4)
    beside = {name.replace(".weight", ".input_scale"): torch.tensor(0.1)}
    tensors = {name: codes, f"{name}_scale": scales, f"{name}_scale_2": whole} | beside
    return tensors, numbers * (repeated(scales, 1, 16, shape) * whole)


def compressed_mxfp4(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, numbers = float4_codes(shape)
    scales = torch.randint(119, 123, (shape[0], shape[1] // 32), dtype=torch.uint8)
    tensors = {f"{name}_packed": codes, f"{name}_scale": scales}
    return tensors, numbers * 2.0 ** (repeated(scales, 1, 32, shape) - 127)


def compressed(layout: str, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


RELEASES = {
    "DeepSeek's FP8": Release({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, deepseek),
    "FP8 by rows": Release(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), float8_rows),
    "FP8 by matrices": Release({"quant_method": "modelopt", "quant_algo": "FP8"}, float8_whole),
    "MXFP8": Release({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8),
    "Kimi's INT4": Release(compressed("pack-quantized", num_bits=4, type="int", group_size=32), kimi),
    "INT8 with zero points": Release(
        compressed("pack-quantized", num_bits=8, type="int", group_size=32, symmetric=False), asymmetric
    ),
    "NVFP4 of compressed-tensors": Release(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), compressed_nvfp4
    ),
    "NVFP4 of ModelOpt": Release({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "MXFP4 of compressed-tensors": Release(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), compressed_mxfp4
    ),
}
