"""The baseline: what somebody writes by hand with transformers and peft, in one process, on the same model and data.

Run as a child process: the first line names the model and the batches; every further one a batch and a number of
steps, and is answered by the seconds that they took.
"""

import json
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Token rows -> inputs, attention mask and targets [rows, longest - 1]; targets are -100 beyond a row's end."""
    longest = max(map(len, rows)) - 1
    inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    targets = torch.full_like(inputs, -100)
    for i, row in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        mask[i, : len(row) - 1] = 1
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, mask, targets


class LocalLoop:
    def __init__(self, directory: Path, rank: int | None) -> None:
        """rank: None = all weights are trained."""
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = LoraConfig(r=rank or 0, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
        self.model = base if rank is None else get_peft_model(base, config)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)

    def step(self, inputs: Tensor, mask: Tensor, targets: Tensor) -> float:
        logits = self.model(input_ids=inputs, attention_mask=None if bool(mask.all()) else mask).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    loop = LocalLoop(Path(request["model"]), request["rank"])
    batches = {name: padded(rows) for name, rows in request["batches"].items()}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        for _ in range(asked["steps"]):
            loop.step(*batches[asked["batch"]])
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
