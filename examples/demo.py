"""The client half of `trainhouse demo`: a small chat model learns to answer like a pirate, over HTTP.

The exit status is 0 only if the held-out loss fell. python -m trainhouse.examples.demo --base-url URL --model NAME
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import trainhouse
from trainhouse import Datum, SamplingClient, SamplingParams, TrainingClient

from .sft import PIRATE, batch, rows, schedule, train_step

QUESTIONS = ["What is the capital of Portugal?", "What is a book?", "Why is the sea salty?"]
WARMUP, LEARNING_RATE = 4, 2e-3


def main() -> int:
    options = parse_options()
    with trainhouse.ServiceClient(options.base_url) as service:
        client = service.create_lora_training_client(options.model, rank=16, seed=0, train_unembed=False)
        tokenizer = client.get_tokenizer()
        train, held_out = (
            [Datum.from_row(row, tokenizer) for row in rows(PIRATE, split)] for split in ("train", "held_out")
        )
        before = evaluate(client, held_out)
        print(f"\n{len(train)} training pairs; held-out loss of {len(held_out)} others before: {before:.3f} per token")
        print("\nCompletions before:")
        show_completions(client.save_weights_and_get_sampling_client(), tokenizer, options.max_tokens)
        print()
        began = time.monotonic()
        with progress_bar(options.steps) as advance:
            for step in range(options.steps):
                learning_rate = LEARNING_RATE * schedule(step, WARMUP, options.steps)
                metrics = train_step(client, batch(train, step, options.batch_size), learning_rate)
                advance(f"step {step + 1:3d}/{options.steps}  loss {loss_per_token(metrics):.3f}")
        print(f"\ntrained in {time.monotonic() - began:.0f} s")
        print("\nCompletions after:")
        show_completions(client.save_weights_and_get_sampling_client(), tokenizer, options.max_tokens)
        after = evaluate(client, held_out)
        print(f"\nheld-out loss {before:.3f} -> {after:.3f} per token")
        print(f"checkpoint {client.save_state('pirate', overwrite=True).result().path}", flush=True)
    return 0 if after < before else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=30, help="of the completions shown")
    return parser.parse_args()


def evaluate(client: TrainingClient, data: Sequence[Datum]) -> float:
    """Returns the loss per token."""
    return loss_per_token(client.forward(data, "cross_entropy").result().metrics)


def loss_per_token(metrics: Mapping[str, float]) -> float:
    return metrics["loss:sum"] / metrics["num_tokens:sum"]


def show_completions(sampler: SamplingClient, tokenizer, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    for question, future in zip(QUESTIONS, futures, strict=True):
        sequence = future.result().sequences[0]
        answer = tokenizer.decode(sequence.tokens.tolist(), skip_special_tokens=True).replace("\n", " ")
        print(f"  {question}\n    {answer}{'' if sequence.stop_reason == 'stop' else ' ...'}")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that prints a line and advances the bar below it; without a terminal or rich it only prints."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        yield lambda line: print(line, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=total)

        def advance(line: str) -> None:
            bar.console.print(line, highlight=False)
            bar.advance(task)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
