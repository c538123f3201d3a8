"""Fine-tunes a model on rows of a dataset, with a learning-rate schedule, held-out loss and checkpoints.

.venv/bin/python examples/sft.py --base-url http://127.0.0.1:8000 --model HuggingFaceTB/SmolLM2-135M-Instruct
Continue a run: add --resume tinker://.../weights/step-000020
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trainhouse
from trainhouse import AdamParams, CheckpointSchedule, Datum, TrainingClient

HELD_OUT = "evaluation/held_out/loss:mean"
PIRATE = Path(__file__).with_name("pirate.jsonl")


def main() -> None:
    options = parse_options()
    first_step = step_of(options.resume) if options.resume else 0
    with trainhouse.ServiceClient(options.base_url, options.api_key) as service:
        if options.resume:
            client = service.create_training_client_from_state_with_optimizer(options.resume)
        else:
            client = service.create_lora_training_client(options.model, rank=16, seed=0)
        tokenizer = client.get_tokenizer()
        train = [Datum.from_row(row, tokenizer) for row in rows(options.data, "train")]
        held_out = [Datum.from_row(row, tokenizer) for row in rows(options.data, "held_out")]
        print(f"{len(train)} rows to train on, {len(held_out)} held out")
        # Both schedules run on the server.
        if held_out:
            first = client.create_evaluation("held_out", options.eval_every, held_out).result()
            print(f"held-out loss {first.metrics[HELD_OUT]:.4f}")
        client.schedule_checkpoints(CheckpointSchedule(every=options.eval_every, keep_last=2)).result()
        for step in range(first_step, options.steps):
            learning_rate = options.learning_rate * schedule(step, options.warmup, options.steps)
            metrics = train_step(client, batch(train, step, options.batch_size), learning_rate)
            loss = metrics["loss:sum"] / metrics["num_tokens:sum"]
            print(f"step {step + 1:3d}  learning rate {learning_rate:.2e}  loss {loss:.4f}")
            if HELD_OUT in metrics:
                print(f"held-out loss {metrics[HELD_OUT]:.4f}")
        if options.steps % options.eval_every and first_step < options.steps:
            client.save_state(f"step-{options.steps:06d}").result()
        for checkpoint in service.create_rest_client().list_checkpoints(client.model_id).result().checkpoints:
            print(f"saved {checkpoint.tinker_path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=PIRATE, help="rows for Datum.from_row, a JSON object per line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint that this script saved")
    return parser.parse_args()


def step_of(path: str) -> int:
    """Returns the step after which a scheduled checkpoint was saved."""
    if (found := re.search(r"/step-(\d+)$", path)) is None:
        raise SystemExit(f"{path} is not a checkpoint of this script: these are named step-000020")
    return int(found[1])


def rows(path: Path, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a split, "train" or "held_out". If rows name none, every tenth is held out."""
    read = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not any("split" in row for row in read):
        held_out = min(9, len(read) - 1) or None  # of fewer rows the last; a single row is trained on
        read = [row | {"split": "held_out" if index % 10 == held_out else "train"} for index, row in enumerate(read)]
    found = [row for row in read if row.get("split", "train") == split]
    if split == "train" and not found:
        raise SystemExit(f"{path} has no rows to train on")
    return found


def batch(data: Sequence[Datum], step: int, size: int) -> list[Datum]:
    """Returns the batch of a step, from data shuffled every epoch. It depends on the step only, so that a resumed run
    gets the batches that the first run would have got."""
    size = min(size, len(data))
    per_epoch = len(data) // size
    epoch, index = divmod(step, per_epoch)
    order = np.random.default_rng(epoch).permutation(len(data))
    return [data[position] for position in order[index * size : (index + 1) * size]]


def schedule(step: int, warmup: int, steps: int) -> float:
    """Returns the learning rate's factor: linear warm-up, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_step(client: TrainingClient, data: Sequence[Datum], learning_rate: float) -> dict[str, float]:
    """Returns the metrics of pass and step. Both requests are sent at once; the server keeps their order."""
    adam = AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(adam, gradient_scale="mean")
    return {**passed.result().metrics, **(stepped.result().metrics or {})}


if __name__ == "__main__":
    main()
