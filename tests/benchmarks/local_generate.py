"""The baseline of sampling: transformers' `generate` of a model with a peft adapter, as somebody writes it by hand.

Reads {"threads", "model", "rank", "prompts"}; answers each {"num_prompts", "num_samples", "max_tokens"} by the seconds
that samples of the first prompts took, with the log-probability of every sampled token.
"""

import json
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from .local_loop import TARGETS


class LocalGenerate:
    def __init__(self, directory: Path, rank: int) -> None:
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS))
        self.model.eval()

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, num_samples: int, max_tokens: int) -> torch.Tensor:
        """Log-probabilities [prompts * num_samples, max_tokens] of tokens drawn at temperature 1; none ends early."""
        generated = self.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            num_return_sequences=num_samples,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.log_softmax(torch.stack(generated.logits, dim=1), dim=-1)
        tokens = generated.sequences[:, prompts.shape[1] :]
        return logprobs.gather(-1, tokens[:, :, None]).squeeze(-1)


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    local = LocalGenerate(Path(setup["model"]), setup["rank"])
    prompts = torch.tensor(setup["prompts"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        logprobs = local.sample(prompts[: asked["num_prompts"]], asked["num_samples"], asked["max_tokens"])
        assert logprobs.shape == (asked["num_prompts"] * asked["num_samples"], asked["max_tokens"])
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
