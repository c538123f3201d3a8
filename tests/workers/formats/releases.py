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

import numpy as np
import torch
from bitsandbytes import functional
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


def mxfp8_inverse(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    tensors, numbers = mxfp8(name, shape)
    return {name: tensors[name], f"{name}_scale_inv": tensors[f"{name}_scale"]}, numbers


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
    tensors[f"{name}_shape"] = torch.tensor(shape)
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


@dataclass(frozen=True)
class Gptq:
    """GPTQ's packing: a string of bits along inputs, the lowest first, and zero points alike along outputs.

    low: whether files hold zero points less one, as before the second version of the format.
    """

    bits: int
    in_order: bool = True
    symmetric: bool = True
    low: bool = True

    def __call__(self, name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
        outputs, inputs = shape
        groups, last, path = blocks(inputs, 32), 1 << self.bits, name.removesuffix(".weight")
        codes, scales = torch.randint(0, last, (inputs, outputs)), some_scales(groups, outputs).half() / last
        zeros = torch.full((groups, outputs), last // 2)
        if not self.symmetric:
            zeros = torch.randint(1 if self.low else 0, last, (groups, outputs))
        of_inputs = torch.arange(inputs) // 32
        of_inputs = of_inputs if self.in_order else of_inputs[torch.randperm(inputs)]
        tensors = {
            "qweight": bit_string(codes.T, self.bits).T.contiguous(),
            "qzeros": bit_string(zeros - 1 if self.low else zeros, self.bits),
            "scales": scales,
            "g_idx": of_inputs.int(),
        }
        numbers = (codes - zeros[of_inputs]) * scales.float()[of_inputs]
        return {f"{path}.{leaf}": tensor for leaf, tensor in tensors.items()}, numbers.T.contiguous()

    def config(self, **others: object) -> dict[str, Any]:
        how = {"bits": self.bits, "group_size": 32, "desc_act": not self.in_order, "sym": self.symmetric}
        return {"quant_method": "gptq", "checkpoint_format": "gptq" if self.low else "gptq_v2"} | how | others

    def release(self, **others: object) -> Release:
        return Release(self.config(**others), self)


def bit_string(codes: Tensor, bits: int) -> Tensor:
    """Packs each row of codes as one string of bits, the lowest first, into int32."""
    ones = (codes.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(1).numpy().astype(np.uint8)
    return torch.from_numpy(np.packbits(ones, axis=1, bitorder="little").view(np.int32))


def awq(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """AutoAWQ's packing of 4 bits along outputs, in an order of its own."""
    outputs, inputs = shape
    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (blocks(inputs, 32), outputs))
    scales, path = (some_scales(blocks(inputs, 32), outputs) / 16).half(), name.removesuffix(".weight")
    tensors = {"qweight": eights(codes), "qzeros": eights(zeros), "scales": scales}
    numbers = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    return {f"{path}.{leaf}": tensor for leaf, tensor in tensors.items()}, numbers.T.contiguous()


def eights(codes: Tensor) -> Tensor:
    """Packs eight codes of a row into int32."""
    parts = [codes[:, source::8] << 4 * place for place, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7))]
    return torch.stack(parts).sum(0).to(torch.int32)


@dataclass(frozen=True)
class Bits4:
    """The packing of bitsandbytes, by its own functions.

    nested: whether scales are codes themselves. storage: dtype as which files hold the codes.
    """

    kind: str
    nested: bool = True
    storage: torch.dtype = torch.uint8

    def __call__(self, name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
        codes, state = functional.quantize_4bit(
            torch.randn(shape) / 30,
            blocksize=64,
            compress_statistics=self.nested,
            quant_type=self.kind,
            quant_storage=self.storage,
        )
        beside = {f"{name}.{leaf}": each.clone() for leaf, each in state.as_dict(packed=True).items()}
        # As one row: its CPU kernel takes wrong scales where blocks continue in the next row.
        state.shape = torch.Size([1, shape[0] * shape[1]])
        return {name: codes} | beside, functional.dequantize_4bit(codes, state).view(shape)

    def release(self) -> Release:
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": self.kind, "bnb_4bit_use_double_quant": self.nested}
        return Release({"quant_method": "bitsandbytes"} | how, self)


def int8(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """The packing of bitsandbytes in 8 bits, by its own functions."""
    codes, largest, _ = functional.int8_vectorwise_quant(torch.randn(shape).half() / 30)
    path, order = name.removesuffix(".weight"), torch.tensor(0, dtype=torch.uint8)
    tensors = {name: codes, f"{path}.SCB": largest, f"{path}.weight_format": order}
    return tensors, codes * (largest / 127).unsqueeze(1)


def torchao_int8(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """torchao's Int8Tensor, as transformers saves it."""
    codes, scales = torch.randint(-128, 128, shape, dtype=torch.int8), some_scales(shape[0], shape[1] // 32) / 16
    path = name.removesuffix("weight")
    tensors = {f"{path}_weight_qdata": codes, f"{path}_weight_scale": scales}
    return tensors, codes * repeated(scales, 1, 32, shape)


def quark_mxfp4(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    tensors, numbers = compressed_mxfp4(name, shape)
    return {name: tensors[f"{name}_packed"], f"{name}_scale": tensors[f"{name}_scale"]}, numbers


def compressed_in_order_of_activations(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """4 bits whose columns are in groups as another order of theirs gives."""
    codes, scales = torch.randint(-8, 8, shape), some_scales(shape[0], blocks(shape[1], 32)).bfloat16()
    groups = (torch.arange(shape[1]) // 32)[torch.randperm(shape[1])]
    whole = torch.tensor(shape, dtype=torch.int64)
    tensors = {f"{name}_packed": integers(codes, 4), f"{name}_scale": scales, f"{name}_shape": whole}
    return tensors | {f"{name}_g_idx": groups.int()}, codes * scales.float()[:, groups]


def int8_rows(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """8 bits in bytes, with a zero point for each row."""
    codes, zeros = (torch.randint(-128, 128, size, dtype=torch.int8) for size in (shape, (shape[0], 1)))
    scales = some_scales(shape[0], 1) / 16
    return {name: codes, f"{name}_scale": scales, f"{name}_zero_point": zeros}, (codes.float() - zeros) * scales


def mxfp6(name: str, shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    codes, scales = torch.randint(0, 64, shape), torch.randint(119, 123, (shape[0], shape[1] // 32), dtype=torch.uint8)
    exponents, mantissas = codes >> 3 & 3, (codes & 7) / 8
    sizes = torch.where(exponents == 0, mantissas, (1 + mantissas) * 2.0 ** (exponents - 1))
    numbers = torch.where(codes < 32, sizes, -sizes) * 2.0 ** (repeated(scales, 1, 32, shape) - 127)
    return {f"{name}_packed": bit_string(codes, 6).view(torch.uint8), f"{name}_scale": scales}, numbers


def compressed(layout: str, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


RELEASES = {
    "DeepSeek's FP8": Release({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, deepseek),
    "FP8 by rows": Release(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), float8_rows),
    "FP8 by matrices": Release({"quant_method": "modelopt", "quant_algo": "FP8"}, float8_whole),
    "MXFP8": Release({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8),
    "MXFP8 of transformers": Release({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8_inverse),
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
    "INT4 in the order of activations": Release(
        compressed("pack-quantized", num_bits=4, type="int", group_size=32, actorder="group"),
        compressed_in_order_of_activations,
    ),
    "INT8 in bytes": Release(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), int8_rows
    ),
    "GPTQ": Gptq(4).release(),
    "GPTQ in the order of activations": Gptq(4, in_order=False, symmetric=False).release(),
    "GPTQ in 2 bits": Gptq(2, symmetric=False).release(),
    "GPTQ in 3 bits": Gptq(3, symmetric=False).release(),
    "GPTQ in 8 bits": Gptq(8, in_order=False).release(),
    "GPTQ, version 2": Gptq(4, symmetric=False, low=False).release(),
    "GPTQ in 3 bits, version 2": Gptq(3, symmetric=False, low=False).release(),
    "AutoRound": Gptq(4).release(quant_method="auto-round", packing_format="auto_round:auto_gptq"),
    "AutoRound without a packing format": Gptq(4, symmetric=False).release(quant_method="auto-round"),
    "AutoRound, its own zero points": Gptq(4, symmetric=False, low=False).release(
        quant_method="auto-round", packing_format="auto_round"
    ),
    "AutoRound as AWQ": Release(
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}, awq
    ),
    "AWQ": Release({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}, awq),
    "bitsandbytes NF4": Bits4("nf4").release(),
    "bitsandbytes FP4": Bits4("fp4", nested=False).release(),
    "bitsandbytes NF4 in numbers": Bits4("nf4", storage=torch.bfloat16).release(),
    "bitsandbytes INT8": Release({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "torchao INT8": Release({"quant_method": "torchao"}, torchao_int8),
    "Quark's FP8": Release({"quant_method": "quark"}, float8_whole),
    "Quark's MXFP4": Release({"quant_method": "quark"}, quark_mxfp4),
    "MXFP6": Release(compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32), mxfp6),
}
