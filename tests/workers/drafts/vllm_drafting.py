"""Script for a Python that has vLLM: a model's likeliest tokens with a draft, and how many draft tokens were accepted.

Reads JSON from standard input: model and draft (directories), method, num_tokens (draft tokens at a time), prompts,
max_tokens, answer. Writes to the file `answer`: tokens of each prompt, passes, and accepted (by position).
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    arguments = json.load(sys.stdin)
    speculative = {
        "method": arguments["method"],
        "model": arguments["draft"],
        "num_speculative_tokens": arguments["num_tokens"],
    }
    llm = LLM(
        model=arguments["model"],
        speculative_config=speculative,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=arguments["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in arguments["prompts"]], params)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "passes": metrics["vllm:spec_decode_num_drafts"].value,
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }
    Path(arguments["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
