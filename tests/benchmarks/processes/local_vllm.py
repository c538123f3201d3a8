"""The baseline of `bench-vllm`: `vllm.LLM` with a LoRA adapter, in its own environment: it imports nothing of ours.

With an argument, on so many threads, else on as many as vLLM takes by itself.
Reads {"model", "adapter", "rank"}; answers each {"prompts", "num_samples", "max_tokens"} by the seconds that the
samples took, with the log-probability of every sampled token.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ["HF_HUB_OFFLINE"] = "1"
if sys.argv[1:]:
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": sys.argv[1]}
# vLLM logs to stdout, which is for answers here.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(value: object) -> None:
    print(json.dumps(value), file=answers, flush=True)


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        setup["model"],
        dtype="float32",
        enable_lora=True,
        max_lora_rank=setup["rank"],
        max_loras=1,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    adapter = LoRARequest("adapter", 1, setup["adapter"])
    answer("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            n=asked["num_samples"],
            max_tokens=asked["max_tokens"],
            temperature=1.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        seconds = time.perf_counter() - started
        samples = [sample for output in outputs for sample in output.outputs]
        assert len(samples) == len(prompts) * asked["num_samples"]
        assert all(len(sample.logprobs) == asked["max_tokens"] for sample in samples)
        answer(seconds)


if __name__ == "__main__":
    main()
