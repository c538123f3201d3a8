"""Script for a Python that has vLLM: the log-probabilities of models with adapters.

Reads a line of JSON for each model: model and adapters (directories), dtype, max_rank, is_mixed (the adapters are in
the form that --enable-mixed-moe-lora-format reads), full (a directory with other weights, or null), prompts (token
ids), max_tokens. Answers a line of JSON: rows, by adapter, for "base", for "full" with its weights in place of the
model's, and for "again" after that, with the likeliest tokens after each prompt and their log-probabilities; or the
error of vLLM in their place, or in place of all.

vLLM's kernels for experts with adapters need a GPU, and its routers for CPUs lack some rules. Here loops compute what
they compute, from the weights and matrices of adapters that vLLM has loaded. Experts without gates it loads on GPUs
alone; here it does. Its rotation for CPUs gives wrong numbers for latent attention: its form without a kernel runs.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The program that our server runs in such a Python.
sys.path.append(str(Path(__file__).parents[3] / "workers" / "engines" / "vllm"))

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

# A model that hangs ends after so many seconds.
MOST_SECONDS = 240
# Of gpt-oss's activation, of which vLLM has no form for CPUs.
LIMIT, ALPHA = 7.0, 1.702


def main() -> None:
    # vLLM logs to stdout, which is for answers here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # vLLM would import itself in a new process to look at each class of models.
    registry._run_in_subprocess = lambda look: look()
    TritonExperts.apply = run_experts
    CPURouter._compute_routing = choose_experts
    FusedMoEConfig.__post_init__ = check_config
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        # A process for each model: vLLM loads no second one.
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                print(json.dumps({"error": f"vLLM ended with status {status}"}), file=answers, flush=True)
            continue
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
        os._exit(0)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        llm = LLM(
            asked["model"],
            dtype=asked["dtype"],
            enable_lora=True,
            max_lora_rank=asked["max_rank"],
            max_loras=1,
            enable_mixed_moe_lora_format=asked["is_mixed"],
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enforce_eager=True,
            skip_tokenizer_init=True,
            language_model_only=True,
            trust_remote_code=True,
            # As the server gives it to vLLM for Llama 4.
            override_generation_config={"attn_temperature_tuning": True},
            disable_log_stats=True,
            enable_prefix_caching=False,
            worker_cls="serve.Worker",
        )
        rows = {"base": greedy(llm, asked, None)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    for number, adapter in enumerate(asked["adapters"], 1):
        request = LoRARequest(adapter, number, adapter, is_3d_lora_weight=asked["is_mixed"])
        try:
            # A request whose adapter fails to load would stay in the queue.
            llm.llm_engine.add_lora(request)
            rows[adapter] = greedy(llm, asked, request)
        except Exception as error:
            rows[adapter] = f"{type(error).__name__}: {error}"
    if asked["full"] is not None:
        try:
            for name, weights in (("full", asked["full"]), ("again", asked["model"])):
                llm.collective_rpc("replace_weights", args=(weights,))
                rows[name] = greedy(llm, asked, None)
        except Exception as error:
            rows["full"] = f"{type(error).__name__}: {error}"
    return {"rows": rows}


def greedy(llm: LLM, asked: dict[str, Any], adapter: LoRARequest | None) -> list[dict[str, Any]]:
    params = SamplingParams(
        temperature=0, max_tokens=asked["max_tokens"], logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)]
    return [
        {
            "tokens": list(output.token_ids),
            "logprobs": [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)],
        }
        for output in outputs
    ]


original_check = FusedMoEConfig.__post_init__


def check_config(self: FusedMoEConfig) -> None:
    with patch.object(type(current_platform), "is_xpu", lambda _: True):
        original_check(self)


original_choice = CPURouter._compute_routing


def choose_experts(self: CPURouter, hidden_states: Tensor, router_logits: Tensor, *rest: Any, **more: Any) -> Any:
    """Has the parameters and results of CPURouter._compute_routing, which knows neither biases nor sigmoids of experts
    that are in no groups."""
    if self.use_grouped_topk or self.custom_routing_function is not None:
        return original_choice(self, hidden_states, router_logits, *rest, **more)
    logits, bias = router_logits.float(), self.e_score_correction_bias
    scores = logits.softmax(-1) if self.scoring_func == "softmax" else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias.flatten()).topk(self.top_k).indices
    weights = scores.gather(-1, chosen)
    if self.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * self.routed_scaling_factor, chosen.int()


def run_experts(
    self: TritonExperts,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Has the parameters of TritonExperts.apply. Sums the weighted outputs of each token's experts.

    Weights on inputs are in hidden_states already. As in vLLM's kernels, adapters take inputs without them, and have
    weights on outputs all the same.
    """
    lora = self._lora_context
    slots, plain = lora.punica_wrapper.token_lora_indices.tolist(), lora.original_hidden_states
    for token, (experts, weights) in enumerate(zip(topk_ids.tolist(), topk_weights, strict=True)):
        # vLLM's first passes, which measure memory, have tokens of no request.
        total, slot = torch.zeros_like(output[token]), slots[token] if token < len(slots) else -1
        for expert, weight in zip(experts, weights, strict=True):
            inner = gate_and_up(self, hidden_states[token], plain[token], w1, expert, slot, activation)
            outer = activated(self, inner, activation)
            total += (1.0 if apply_router_weight_on_input else weight) * down(self, outer, w2, expert)
            total += weight * down_of_adapter(self, outer, expert, slot)
        output[token] = total


def gate_and_up(
    experts: TritonExperts, x: Tensor, plain: Tensor, w1: Tensor, expert: int, slot: int, activation: MoEActivation
) -> Tensor:
    y, lora = w1[expert] @ x, experts._lora_context
    if experts.w1_bias is not None:
        y = y + experts.w1_bias[expert]
    if slot < 0:
        return y
    pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)
    terms = [b[slot, expert] @ (a[slot, expert] @ plain) for a, b in pairs]
    alternate = len(terms) == 2 and activation == MoEActivation.SWIGLUOAI
    return y + (torch.stack(terms, -1).flatten() if alternate else torch.cat(terms))


def activated(experts: TritonExperts, y: Tensor, activation: MoEActivation) -> Tensor:
    if activation == MoEActivation.SWIGLUOAI:
        gate, up = y[::2].clamp(max=LIMIT), y[1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * (ALPHA * gate).sigmoid()
    result = y.new_empty(1, experts.adjust_N_for_activation(len(y), activation))
    experts.activation(activation, result, y[None].contiguous())
    return result[0]


def down(experts: TritonExperts, x: Tensor, w2: Tensor, expert: int) -> Tensor:
    y = w2[expert] @ x
    return y if experts.w2_bias is None else y + experts.w2_bias[expert]


def down_of_adapter(experts: TritonExperts, x: Tensor, expert: int, slot: int) -> Tensor | float:
    if slot < 0:
        return 0.0
    (a,), (b,) = experts._lora_context.w2_lora_a_stacked, experts._lora_context.w2_lora_b_stacked
    return b[slot, expert] @ (a[slot, expert] @ x)


if __name__ == "__main__":
    main()
