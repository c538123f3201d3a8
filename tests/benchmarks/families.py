"""Models with recurrent layers, latent attention and experts: training and sampling through the official SDK over HTTP
against transformers and peft in process.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..tiny import tiny_model
from .harness import RANK, SHAPE, THREADS, Line, Section, Setup, child, in_turn, median_ratio, num_tokens, rows
from .processes.clients import connect, new_run
from .sampling import IN_BATCH, LENGTH, PROMPTS, SAMPLES, Prompts, sample_batch
from .training import RemoteLoop

HYBRID: Mapping[str, Any] = {
    "head_dim": 32,
    "layer_types": 3 * ["linear_attention"] + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 192,
    "first_k_dense_replace": 1,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 32}
MAMBA: Mapping[str, Any] = {
    "layer_types": 3 * ["linear_attention"] + ["full_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 768,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
}
DENSE = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
IN_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

# Name, kind, settings, and what peft adapts: linear layers, and parameters of experts.
MODELS: tuple[tuple[str, str, Mapping[str, Any], tuple[str, ...], tuple[str, ...]], ...] = (
    ("Qwen3.5", "qwen3_5", HYBRID, (*ATTENTION, *DENSE, "in_proj_qkv", "in_proj_z", "out_proj"), ()),
    ("DeepSeek-V3", "deepseek_v3", LATENT, ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", *DENSE), IN_EXPERTS),
    ("Qwen3-MoE", "qwen3_moe", EXPERTS, ATTENTION, IN_EXPERTS),
    ("Granite 4", "granite4", MAMBA, (*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"), ()),
)
BATCH = {"16x128": rows([128] * 16)}
STEPS, TRAINING, SAMPLING = 2, 1.3, 2.0


def families(setup: Setup) -> Section:
    table = [_compare(setup, *model) for model in MODELS]
    lines = []
    for row in table:
        lines.append(Line(f"{row['model']}: training, times peft's tokens/s", row["training"], "at least", TRAINING))
        lines.append(Line(f"{row['model']}: sampling, times generate's", row["sampling"], "at least", SAMPLING))
    notes = [
        f"Medians of {setup.rounds} rounds; training of 16x128 tokens, {STEPS} steps a round; 8x4 samples of",
        "64 tokens, temperature 1, log-probabilities on, new prompts of 64 tokens. In training, experts have adapters:",
        "here the shared-outer ones, in peft a pair of matrices for each expert. generate runs without these,",
        "because peft multiplies out all of them at every token.",
    ]
    return Section("Families of models against transformers and peft", table, lines, notes)


def _compare(
    setup: Setup,
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    targets: tuple[str, ...],
    parameters: tuple[str, ...],
) -> dict[str, Any]:
    model = tiny_model(kind, setup.scratch / kind, **{**SHAPE, **settings})
    about = {"threads": THREADS, "model": str(model), "rank": RANK, "targets": targets, "parameters": parameters}
    unseen = Prompts()
    with (
        child("local", "train") as peft,
        child("local", "generate") as generate,
        replace(setup, model=model).server(f"{kind}-state") as server,
        connect(server.url) as service,
    ):
        peft.ask(about | {"batches": BATCH})
        generate.ask(about | {"parameters": (), "prompts": unseen.new(PROMPTS)})
        remote = RemoteLoop(service, BATCH)
        sampler = new_run(service, 1).save_weights_and_get_sampling_client().result(60)
        asked = {"num_prompts": PROMPTS, "num_samples": SAMPLES, "max_tokens": LENGTH}
        sides = {
            "peft": lambda: peft.ask({"batch": "16x128", "steps": STEPS})[0],
            "ours": lambda: remote.train("16x128", STEPS),
            "generate": lambda: generate.ask(asked)[0],
            "samples": lambda: sample_batch([sampler] * PROMPTS, unseen),
        }
        seconds = in_turn(sides, setup.rounds, warm_ups=1)
    return _row(name, seconds)


def _row(name: str, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    trained, sampled = STEPS * num_tokens(BATCH["16x128"]), IN_BATCH
    rate = {side: tokens / statistics.median(seconds[side]) for side, tokens in (("peft", trained), ("ours", trained))}
    rate |= {side: sampled / statistics.median(seconds[side]) for side in ("generate", "samples")}
    return {
        "model": name,
        "peft tokens/s": rate["peft"],
        "tokens/s": rate["ours"],
        "training": median_ratio(seconds["peft"], seconds["ours"]),
        "generate tokens/s": rate["generate"],
        "sampled tokens/s": rate["samples"],
        "sampling": median_ratio(seconds["generate"], seconds["samples"]),
    }
