"""The baselines: what one writes by hand with transformers and peft, in one process, on the same model and data.

The first line names "threads", "model" and "rank" (null: all weights are trained), perhaps what is adapted ("targets",
names of linear layers, and "parameters", those of experts), and the data:
local.py train: "batches", name -> token rows. Each further line is {"batch", "steps"}.
local.py generate: "prompts". Each further line is {"num_prompts", "num_samples", "max_tokens"}; every sampled token
    gets its log-probability.
Answers each further line with the seconds that it took: of the clock, and of this process's CPU.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ..harness import Rows, answer_lines, reply

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(setup: dict[str, Any]) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32)
    if setup["rank"] is None:
        return base
    adapted = {"target_modules": setup.get("targets", TARGETS), "target_parameters": setup.get("parameters")}
    return get_peft_model(base, LoraConfig(r=setup["rank"], lora_alpha=32, lora_dropout=0.0, **adapted))


def padded(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs, attention mask and targets, [rows, longest - 1]; targets are -100 beyond a row's end."""
    longest = max(map(len, rows)) - 1
    inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    targets = torch.full_like(inputs, -100)
    for i, row in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        mask[i, : len(row) - 1] = 1
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, mask, targets


def training(setup: dict[str, Any]) -> Callable[..., None]:
    model = load(setup)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    batches = {name: padded(rows) for name, rows in setup["batches"].items()}

    def train(batch: str, steps: int) -> None:
        inputs, mask, targets = batches[batch]
        for _ in range(steps):
            logits = model(input_ids=inputs, attention_mask=None if bool(mask.all()) else mask).logits
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return train


def generating(setup: dict[str, Any]) -> Callable[..., None]:
    model = load(setup).eval()
    all_prompts = torch.tensor(setup["prompts"])

    @torch.no_grad()
    def generate(num_prompts: int, num_samples: int, max_tokens: int) -> None:
        prompts = all_prompts[:num_prompts]
        generated = model.generate(
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
        sampled = logprobs.gather(-1, tokens[:, :, None]).squeeze(-1)
        assert sampled.shape == (num_prompts * num_samples, max_tokens)

    return generate


def main(kind: str) -> None:
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    work = {"train": training, "generate": generating}[kind](setup)

    def answer(asked: dict[str, Any]) -> tuple[float, float]:
        started, cpu = time.perf_counter(), time.process_time()
        work(**asked)
        return time.perf_counter() - started, time.process_time() - cpu

    reply("ready")
    answer_lines(answer)


if __name__ == "__main__":
    main(sys.argv[1])
