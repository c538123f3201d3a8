"""Reads how a release packed its weights from its config.json, and refuses what cannot be read. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .name_patterns import NamePatterns
from .other_models import text_part_of

MLX = "mlx"
"""Stands for the `quant_method` that MLX's releases do not name."""

METHODS = (
    *("mxfp4", "mxfp8", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"),
    *("gptq", "awq", "auto-round", "intel/auto-round", "bitsandbytes", "quark", "torchao"),
)
"""Values of `quant_method` in a config.json whose weights can be dequantized."""

_REFUSED = {
    "aqlm": "each is a sum of vectors of trained codebooks, which its own program decodes",
    "vptq": "they are vectors of trained codebooks, which its own program decodes",
    "quip": "they are points of a lattice in a rotated basis, which its own program decodes",
    "spqr": "they are compressed with outliers of their own, which its own program decodes",
    "higgs": "they are points of a grid in a rotated basis, which its own program decodes",
    "fp_quant": "they are in a rotated basis, in which inputs have to be rotated too",
    "eetq": "they are in the order of one CUDA kernel",
    "quanto": "only optimum-quanto writes and reads its files: transformers saves none",
    "bitnet": "its layers also round inputs to 8 bits, so that without it log-probabilities would not be the model's",
    "gemma": "its layers also round inputs, to ranges that the release was trained with",
    "fouroversix": "its program also rounds inputs to 4 bits, and decides the scales of both",
    "nvfp4": "transformers packs weights so when it loads them, but saves none",
    "sinq": "rows and columns have scales, in an order of its own program",
}
"""Methods whose weights are no codes with scales, or that round inputs too, and why."""

_DECOMPRESS = "decompress them by compressed-tensors 0.12 (ModelCompressor) and save them through transformers"
_CONVERTED = {
    MLX: "convert them by `mlx_lm.convert --dequantize`",
    "metal": "load them in transformers with MetalConfig(dequantize=True) and save them",
    "hqq": "dequantize each layer by hqq (HQQLinear.dequantize) and save them through transformers",
    "sparse-bitmask": _DECOMPRESS,
    "sparse-24-bitmask": _DECOMPRESS,
    "torchao INT4": "pack the original model in INT8 by torchao (Int8WeightOnlyConfig) or in INT4 by llm-compressor",
}
"""Methods and layouts that another program converts, and how."""

_REMEDY = "use a release in bfloat16, GPTQ, AWQ or FP8, or dequantize this one with the program that made it"

# Layouts of compressed-tensors in the order of one kernel.
_OTHER_LAYOUTS = ("marlin-24",)
_GPTQ_FORMATS = ("gptq", "gptq_v2")
# How AutoRound names the packing of GPTQ with zero points that are one too low. AutoRound and vLLM take it as default.
_LOW_ZERO_POINTS = "auto_round:auto_gptq"
_AUTO_ROUND = (
    *("auto_round", _LOW_ZERO_POINTS, "auto_round:gptqmodel", "auto_round:auto_awq"),
    *("auto_round:llm_compressor", "auto_round:fp8", "auto_round:fp8_static"),
)
GPTQ_BITS = (2, 3, 4, 5, 6, 7, 8)
_MLX_TYPES = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "starcoder2", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "granite", "cohere", "cohere2", "ernie4_5", "helium", "nemotron", "olmo2", "olmo3", "seed_oss"),
    *("smollm3", "stablelm"),
)
"""Types of models whose files have the same names and numbers in mlx-lm as in transformers. mlx-lm adds one to norms of
others, splits or swaps matrices, stacks experts, or renames them."""


@dataclass(frozen=True)
class Grouping:
    """The way the weights of some modules are packed."""

    bits: int
    """Bits of a code."""
    size: int | None
    """Columns that share a scale, None if a whole row does."""
    is_float: bool = False
    """True if codes are floats (MXFP6), not integers."""
    targets: NamePatterns | None = None
    """Names of the modules; None if it is all that no other grouping names."""


@dataclass(frozen=True)
class Quantization:
    """The parts of a `quantization_config` that shapes in files do not show."""

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    """Possible rows and columns that share a scale."""
    groupings: tuple[Grouping, ...] = ()
    low_zero_points: bool = False
    """True if files of GPTQ hold zero points less one."""

    @staticmethod
    def of(config: Mapping[str, object]) -> "Quantization":
        """Reads it from a config.json, or from its text part's; without one, returns an empty one.

        Raises:
            ValueError: its weights cannot be dequantized, or a number in it is wrong.
        """
        given: Any = quantization_of(config)
        method = str(given.get("quant_method", ""))
        if method in _REFUSED:
            raise ValueError(f"weights quantized by {method} are not supported, because {_REFUSED[method]}: {_REMEDY}")
        model_type = config.get("model_type")
        if method == MLX and model_type is not None and (refused := refusal_of_mlx(str(model_type))) is not None:
            raise ValueError(refused)
        if method in _CONVERTED:
            raise conversion_error(method)
        if given.get("quant_method") is not None and method not in METHODS:
            raise ValueError(
                f"weights quantized by {method} are not supported, only by {', '.join(METHODS)}: use another release"
            )
        low = given.get("checkpoint_format", given.get("format", "gptq")) != "gptq_v2"
        if method.endswith("auto-round"):
            low = _packing_of_autoround(given) == _LOW_ZERO_POINTS
        _check_layout(method, given)
        return Quantization(method, tuple(_blocks(given)), tuple(_groupings(method, given)), low)

    def groupings_of(self, module: str) -> Sequence[Grouping]:
        """Returns how the weight of a module may be packed."""
        named = [each for each in self.groupings if each.targets is not None and each.targets.match(module)]
        return named or [each for each in self.groupings if each.targets is None] or self.groupings


def quantization_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the `quantization_config` of a config.json or of its text part, empty if it has none.

    That of MLX's releases, which older ones call `quantization`, names no method: it gets one.
    """
    nested = text_part_of(config).get("quantization_config")
    given = config.get("quantization_config") or nested or config.get("quantization")
    if not isinstance(given, dict):
        return {}
    is_of_mlx = "quant_method" not in given and {"group_size", "bits"} <= given.keys()
    return {**given, "quant_method": MLX} if is_of_mlx else given


def refusal_of_mlx(model_type: str) -> str | None:
    """Returns why models of this type are not read from MLX's unpacked files, None if they are."""
    if model_type in _MLX_TYPES:
        return None
    return (
        f"{model_type} models in MLX's files are not supported, because these have other names or numbers than"
        f" transformers' files: {_REMEDY}"
    )


def conversion_error(packing: str) -> ValueError:
    """Returns the error for weights that another program has to convert."""
    return ValueError(f"weights packed by {packing} are not supported: {_CONVERTED[packing]}, or use another release")


def quantization_refusal(config: Mapping[str, object]) -> str | None:
    """Returns why the weights of a model with this config.json cannot be dequantized, None if they can."""
    try:
        Quantization.of(config)
    except ValueError as error:
        return str(error)
    return None


def _check_layout(method: str, given: Any) -> None:
    """Raises ValueError if the method packed the weights in another way than those that can be read."""
    if method == "gptq":
        _check_known("checkpoint_format", given.get("checkpoint_format", given.get("format", "gptq")), _GPTQ_FORMATS)
    elif method == "awq":
        _check_known("version", str(given.get("version", given.get("format", "gemm"))).lower(), ("gemm",))
    elif method.endswith("auto-round"):
        _check_known("packing_format", _packing_of_autoround(given), _AUTO_ROUND)
    elif method == "compressed-tensors":
        sparsity = given.get("sparsity_config")
        sparse = sparsity.get("format") if isinstance(sparsity, dict) else None
        for layout in (given.get("format"), sparse, *(each.get("format") for each in groups_of(given))):
            if layout in _CONVERTED:
                raise conversion_error(layout)
            if layout in _OTHER_LAYOUTS:
                raise ValueError(f"weights packed as {layout} are not supported: {_REMEDY}")
        transforms = given.get("transform_config")
        if isinstance(transforms, dict) and transforms.get("config_groups"):
            raise ValueError(f"weights in a rotated basis (transform_config) are not supported: {_REMEDY}")


def _packing_of_autoround(given: Any) -> object:
    packing = given.get("packing_format")
    return _LOW_ZERO_POINTS if packing in (None, "auto") else packing


def _check_known(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"quantization_config has {key} {value!r}, supported is {', '.join(known)}: {_REMEDY}")


def groups_of(given: Any) -> Iterator[Any]:
    """Yields the groups of a compressed-tensors `quantization_config` that have settings of `weights`."""
    groups = given.get("config_groups")
    for each in groups.values() if isinstance(groups, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("weights"), dict):
            yield each


def _blocks(given: Any) -> Iterator[tuple[int, int]]:
    for key, block in (
        ("weight_block_size", given.get("weight_block_size")),
        *(("block_structure", each["weights"].get("block_structure")) for each in groups_of(given)),
    ):
        if block is None:
            continue
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise ValueError(f"quantization_config has {key} {block!r}, which must be two numbers: use another release")
        yield _positive(key, block[0]), _positive(key, block[1])


def _groupings(method: str, given: Any) -> Iterator[Grouping]:
    if method in ("gptq", "awq") or method.endswith("auto-round"):
        bits = given.get("bits", given.get("w_bit", 4))
        if type(bits) is not int or bits not in ((4,) if method == "awq" else GPTQ_BITS):
            raise ValueError(f"quantization_config has bits {bits!r}: {_REMEDY}")
        yield Grouping(bits, group_size_of("group_size", given.get("group_size", given.get("q_group_size"))))
    for group in groups_of(given):
        weights = group["weights"]
        size, bits = group_size_of("group_size", weights.get("group_size")), weights.get("num_bits")
        if weights.get("type") == "int":
            if type(bits) is not int or not 1 <= bits <= 8:
                raise ValueError(f"quantization_config has num_bits {bits!r}, supported are 1 to 8: {_REMEDY}")
            yield Grouping(bits, size, targets=_targets(group.get("targets")))
        elif (weights.get("type"), bits) == ("float", 6):
            yield Grouping(6, 32, True, _targets(group.get("targets")))


def _targets(given: object) -> NamePatterns | None:
    """Returns the modules that a group of compressed-tensors is of, None if it names all of a class of modules."""
    names = [str(each) for each in given] if isinstance(given, list) else []
    return None if not names or any(each[:1].isupper() for each in names) else NamePatterns.of(names)


def group_size_of(key: str, value: object) -> int | None:
    """Returns how many columns share a scale, None if all of a row do."""
    return None if value in (None, -1) else _positive(key, value)


def _positive(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"quantization_config has {key} {value!r}, which must be at least 1: use another release")
    return value
