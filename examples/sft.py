"""Fine-tunes a model on question/answer pairs, with a learning-rate schedule, held-out loss and checkpoints.

.venv/bin/python examples/sft.py --base-url http://127.0.0.1:8000 --model HuggingFaceTB/SmolLM2-135M-Instruct
Continue a run: add --resume tinker://.../weights/step-20
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import trainhouse
from trainhouse import AdamParams, Datum, TrainingClient

PIRATE = Path(__file__).with_name("pirate.jsonl")


def main() -> None:
    options = parse_options()
    with trainhouse.ServiceClient(options.base_url, options.api_key) as service:
        if options.resume:
            client = service.create_training_client_from_state_with_optimizer(options.resume)
        else:
            client = service.create_lora_training_client(options.model, rank=16, seed=0, train_unembed=False)
        tokenizer = client.get_tokenizer()
        train = [datum(tokenizer, row) for row in rows(options.data, "train")]
        held_out = [datum(tokenizer, row) for row in rows(options.data, "held_out")]
        first_step = int(options.resume.rpartition("-")[2]) if options.resume else 0

        print(f"held-out loss {evaluate(client, held_out):.4f}")

        def save_and_evaluate(step: int) -> None:
            path = client.save_state(f"step-{step}", overwrite=True).result().path
            print(f"held-out loss {evaluate(client, held_out):.4f}  saved {path}")

        client.at_steps(options.eval_every, save_and_evaluate, num_steps=first_step)
        for step in range(first_step, options.steps):
            learning_rate = options.learning_rate * schedule(step, options.warmup, options.steps)
            loss = train_step(client, batch(train, step, options.batch_size), learning_rate)
            print(f"step {step + 1:3d}  learning rate {learning_rate:.2e}  loss {loss:.4f}")
        if options.steps % options.eval_every:
            save_and_evaluate(options.steps)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=PIRATE, help="lines of {split, question, answer}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint that this script saved")
    return parser.parse_args()


def rows(path: Path, split: str) -> Iterator[dict[str, str]]:
    return (row for row in map(json.loads, path.read_text().splitlines()) if row["split"] == split)


def chat_prompt(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def datum(tokenizer, row: dict[str, str]) -> Datum:
    answer = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
    return answered(chat_prompt(tokenizer, row["question"]), answer)


def answered(prompt: list[int], answer: list[int]) -> Datum:
    """Returns a datum that trains on the answer, including its end token; the prompt's positions have weight 0."""
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})


def batch(data: Sequence[Datum], step: int, size: int) -> list[Datum]:
    """Returns the batch of a step, from data shuffled every epoch. It depends on the step only, so that a resumed run
    gets the batches that the first run would have got."""
    per_epoch = len(data) // size
    epoch, index = divmod(step, per_epoch)
    order = np.random.default_rng(epoch).permutation(len(data))
    return [data[position] for position in order[index * size : (index + 1) * size]]


def schedule(step: int, warmup: int, steps: int) -> float:
    """Returns the learning rate's factor: linear warm-up, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_step(client: TrainingClient, data: Sequence[Datum], learning_rate: float) -> float:
    """Returns the loss per token before the step. Both requests are sent at once; the server keeps their order."""
    adam = AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(adam, gradient_scale="mean")
    loss = passed.result().metrics["loss:sum"] / num_tokens(data)
    stepped.result()
    return loss


def evaluate(client: TrainingClient, data: Sequence[Datum]) -> float:
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"] / num_tokens(data)


def num_tokens(data: Sequence[Datum]) -> float:
    return sum(float(one.loss_fn_inputs["weights"].sum()) for one in data)


if __name__ == "__main__":
    main()
