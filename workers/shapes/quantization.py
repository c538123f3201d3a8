"""Reads how a release packed its weights from its config.json, and refuses what cannot be read. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from .name_patterns import NamePatterns
from .other_models import text_part_of
from .packed_format import Grouping, Quantization, packed_formats

MLX = "mlx"
"""Stands for the `quant_method` that MLX's releases do not name."""

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

REMEDY = "use a release in bfloat16, GPTQ, AWQ or FP8, or dequantize this one with the program that made it"

_MLX_TYPES = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "starcoder2", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "granite", "cohere", "cohere2", "ernie4_5", "helium", "nemotron", "olmo2", "olmo3", "seed_oss"),
    *("smollm3", "stablelm"),
)
"""Types of models whose files have the same names and numbers in mlx-lm as in transformers. mlx-lm adds one to norms of
others, splits or swaps matrices, stacks experts, or renames them."""


def read_quantization(config: Mapping[str, object]) -> Quantization:
    """Reads it from a config.json, or from its text part's; without one, returns an empty one.

    Raises:
        ValueError: its weights cannot be dequantized, or a number in it is wrong.
    """
    given: Any = quantization_of(config)
    method = str(given.get("quant_method", ""))
    if method in _REFUSED:
        raise ValueError(f"weights quantized by {method} are not supported, because {_REFUSED[method]}: {REMEDY}")
    model_type = config.get("model_type")
    if method == MLX and model_type is not None and (refused := refusal_of_mlx(str(model_type))) is not None:
        raise ValueError(refused)
    if method in _CONVERTED:
        raise conversion_error(method)
    formats, own = packed_formats(), Quantization()
    if method in formats:
        own = formats[method].settings(given)
    elif given.get("quant_method") is not None:
        known = f"only by {', '.join(formats)}" if formats else "because this installation is without workers/formats"
        raise ValueError(f"weights quantized by {method} are not supported, {known}: use another release")
    groupings = (*own.groupings, *_groupings_of_groups(given))
    return Quantization(method, tuple(_blocks(given)), groupings, own.low_zero_points)


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
        f" transformers' files: {REMEDY}"
    )


def conversion_error(packing: str) -> ValueError:
    """Returns the error for weights that another program has to convert."""
    return ValueError(f"weights packed by {packing} are not supported: {_CONVERTED[packing]}, or use another release")


def check_not_converted(layout: object) -> None:
    """Raises ValueError if another program has to convert weights in this layout."""
    if isinstance(layout, str) and layout in _CONVERTED:
        raise conversion_error(layout)


def quantization_refusal(config: Mapping[str, object]) -> str | None:
    """Returns why the weights of a model with this config.json cannot be dequantized, None if they can."""
    try:
        read_quantization(config)
    except ValueError as error:
        return str(error)
    return None


def check_known(key: str, value: object, known: tuple[str, ...]) -> None:
    """Raises ValueError if the value of a key of a `quantization_config` is not known."""
    if value not in known:
        raise ValueError(f"quantization_config has {key} {value!r}, supported is {', '.join(known)}: {REMEDY}")


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


def _groupings_of_groups(given: Any) -> Iterator[Grouping]:
    for group in groups_of(given):
        weights = group["weights"]
        size, bits = group_size_of("group_size", weights.get("group_size")), weights.get("num_bits")
        if weights.get("type") == "int":
            if type(bits) is not int or not 1 <= bits <= 8:
                raise ValueError(f"quantization_config has num_bits {bits!r}, supported are 1 to 8: {REMEDY}")
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
