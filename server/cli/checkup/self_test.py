"""Serves a small model of random weights on this machine, trains and samples it, next to the peak of its devices."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ....client.errors import TrainhouseError
from ....client.service import ServiceClient
from ..child_server import served
from ..errors import CommandFailed
from .bench import Load, measure, rows_of
from .machine import Finding

MODEL = "trainhouse/self-test"


@dataclass(frozen=True)
class Size:
    """The sizes of a model of the Llama family whose matrices keep a device busy, and a load for it."""

    hidden: int
    layers: int
    mlp: int
    vocabulary: int
    dtype: type[np.float32 | np.float16]
    load: Load


CPU = Size(512, 6, 1536, 4096, np.float32, Load(sequences=4, length=128, steps=3))
GPU = Size(2048, 12, 5632, 32000, np.float16, Load(sequences=8, length=1024, steps=10))
_HEAD = 64


def self_test(size: Size) -> Iterator[Finding]:
    """Yields the measured speeds, or the problem that prevented it."""
    with tempfile.TemporaryDirectory(prefix="trainhouse-doctor-") as scratch:
        model, state_dir = Path(scratch, "model"), Path(scratch, "state")
        write_model(model, size)
        state_dir.mkdir(mode=0o700)
        flags = ["--base-model", f"{MODEL}={model}", "--port", "0", "--state-dir", str(state_dir)]
        try:
            with (
                served(flags, state_dir) as server,
                ServiceClient(server.url, "tml-doctor", retry_seconds=5) as service,
            ):
                speeds = measure(service, MODEL, size.load)
        except (CommandFailed, TrainhouseError) as error:
            yield Finding("self-test", "server", str(error), "problem", "see the reason, and docs/install.md")
            return
    for name, value in rows_of(speeds):
        yield Finding("self-test", name, value)


def write_model(directory: Path, size: Size) -> None:
    """Writes config.json and model.safetensors of a Llama with random weights and no tokenizer."""
    directory.mkdir()
    heads = size.hidden // _HEAD
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": np.dtype(size.dtype).name,
    }
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0).normal(0.0, 0.02, 1 << 20).astype(size.dtype)
    weights = {
        name: np.ones(shape, size.dtype) if len(shape) == 1 else np.resize(random, shape)
        for name, shape in _shapes(size).items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def _shapes(size: Size) -> Mapping[str, tuple[int, ...]]:
    narrow = size.hidden // 2
    of_layer = {
        "self_attn.q_proj": (size.hidden, size.hidden),
        "self_attn.k_proj": (narrow, size.hidden),
        "self_attn.v_proj": (narrow, size.hidden),
        "self_attn.o_proj": (size.hidden, size.hidden),
        "mlp.gate_proj": (size.mlp, size.hidden),
        "mlp.up_proj": (size.mlp, size.hidden),
        "mlp.down_proj": (size.hidden, size.mlp),
        "input_layernorm": (size.hidden,),
        "post_attention_layernorm": (size.hidden,),
    }
    whole: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    for layer in range(size.layers):
        whole |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return whole
