"""Requests with most of their fields, and to routes that the API's document does not list: its examples are short.

Names of things (model_id, path, ...) are filled in by Extremes.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import save

from ..server.real import MODEL

API = "/api/v1/"
ADAPTER_CONFIG = json.dumps(
    {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_version": "0.19.0"}
).encode()


def _floats(*values: float) -> dict[str, Any]:
    return {"data": values, "dtype": "float32", "shape": [len(values)]}


def _training(loss: str, inputs: dict[str, Any], config: dict[str, float], **fields: object) -> dict[str, Any]:
    tokens = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    targets = {"target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]}}
    datum = {"model_input": tokens, "loss_fn_inputs": targets | inputs}
    return {"model_id": "", "loss_fn": loss, "loss_fn_config": config, "data": [datum, datum]} | fields


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = {"logprobs": _floats(-1, -2, -3), "advantages": _floats(1, -1, 0.5)}
_SPARSE = {"data": [1.0], "dtype": "float32", "shape": [1, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]}
_TRAINING = (
    _training("cross_entropy", {"weights": _floats(0, 1, 1)}, {}, loss_weight=0.5, forward_only=True),
    _training("importance_sampling", _POLICY, {}, evaluation={"name": "heldout", "every": 2}),
    _training("ppo", _POLICY | {name: _floats(value, value, value) for name, value in _CLIP.items()}, {}),
    _training("cispo", _POLICY, _CLIP),
    _training("dro", _POLICY, {"beta": 0.05}),
    _training("gspo", _POLICY | {"sequence_ratio_mask": _floats(0, 1, 1)}, {}),
    _training("stable_reinforce", {"advantages": _floats(1, 1, 1)}, {"kl_coeff": 0.01}),
    _training("value_mse", {"returns": _floats(1, 2, 3), "old_values": _floats(1, 2, 3)}, {"clip": 0.2}),
    {"model_id": "", "forward_backward_input": {"loss_fn": "cross_entropy", "data": [{"model_input": [5, 6, 7]}]}},
)
_SAMPLING_PARAMS = {"max_tokens": 3, "seed": 1, "stop": ["a", "b"], "temperature": 0.7, "top_k": 5, "top_p": 0.9}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1.0}}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"pattern": "^a+$"}, "c": {"items": {"enum": [1, "x"]}}},
    "required": ["a"],
}
_CONSTRAINTS = ({"json_schema": _SCHEMA}, {"regex": "[ab]{1,3}|c+"}, {"grammar": 'start: A+\nA: /[a-c]{2}/ | "x"\n'})
_SAMPLING = (
    {"sampling_params": _SAMPLING_PARAMS | _PENALTIES, "num_samples": 2, "prompt_logprobs": True},
    {"prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2},
    {"target_prompt_logprobs": {"data": [6, 7], "dtype": "int64", "shape": [2, 1]}, "record_stability_info": True},
    *({"sampling_params": {"max_tokens": 4, "constraint": one}} for one in _CONSTRAINTS),
)
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud83d\ude00"}'}}
_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "r"},
]
_OPENAI = {"model": "", "max_tokens": 3, "n": 2, "stop": ["x"], "stop_token_ids": [9], "min_p": 0.1, "stream": True}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_LORA = {"rank": 2, "seed": 1, "train_attn": False, "alpha": 16.0, "expert_factors": "each"}
_DRAFT = {"algorithm": "dflash", "num_layers": 1, "capture_layers": [0], "block_size": 4, "mask_token_id": 3}
_SCHEDULE = {"every": 2, "keep_best": 1, "metric": "evaluation/heldout/loss:mean", "prefix": "st", "ttl_seconds": 3600}
_ROWS = (
    {"messages": _MESSAGES, "tools": json.dumps(_TOOLS), "system": "s", "chat_template_kwargs": {}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]},
    *({"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "c", "output": "b"}, [{"text": "a"}]),
    _training("cross_entropy", {"weights": _SPARSE}, {}),
)


def full_examples() -> Iterator[tuple[str, str, object]]:
    """Yields methods, paths and bodies."""
    for path in ("forward_backward", "forward", "create_evaluation"):
        yield from (("post", API + path, body) for body in _TRAINING)
    prompt = {"sampling_session_id": "", "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}}
    yield from (("post", f"{API}asample", prompt | fields) for fields in _SAMPLING)
    yield "post", f"{API}optim_step", {"model_id": "", "adam_params": {"beta1": 0.9, "eps": 1e-8}, "gradient_scale": 2}
    new = {"session_id": "", "base_model": MODEL, "user_metadata": {"trainhouse.checkpoints": '{"every": 10}'}}
    yield "post", f"{API}create_model", new | {"model_seq_id": 7, "lora_config": _LORA}
    yield "post", f"{API}create_model", new | {"model_seq_id": 8, "draft": _DRAFT, "model_role": "draft"}
    yield "post", f"{API}schedule_checkpoints", {"model_id": "", "checkpoints": _SCHEDULE}
    for extra in ({"tools": _TOOLS}, {"response_format": _FORMAT}, {"logprobs": True, "top_logprobs": 3}):
        yield "post", "/v1/chat/completions", _OPENAI | {"messages": _MESSAGES} | extra
    yield "post", "/v1/completions", _OPENAI | {"prompt": [[5, 6], [7]], "logprobs": 2, "echo": True}
    yield from (("post", f"/console/data?model={MODEL}", row) for row in _ROWS)
    yield "post", "/console/admin/keys", {"name": "n", "scopes": ["read"], "requests_per_minute": 5}


def adapter() -> bytes:
    """Returns the content of an adapter_model.safetensors."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    return save({name.format("A"): np.zeros((2, 64), np.float32), name.format("B"): np.zeros((64, 2), np.float32)})
