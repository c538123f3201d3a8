"""Trains a draft model for speculative decoding, reports its held-out acceptance length and saves checkpoints.

.venv/bin/python examples/draft.py --base-url http://127.0.0.1:8000 --algorithm eagle3 --rollouts 1
Continue a run: the same arguments, and --resume tinker://.../weights/step-20-acceptance-2.4137

The names of checkpoints have the step, which a resumed run continues from, and the acceptance length, which shows the
best of them.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient, TrainingClient
from trainhouse.examples.sft import PIRATE, batch, rows, schedule

NAME = re.compile(r"step-(\d+)-acceptance-(\d+\.\d+)")
"""The name of a checkpoint of this script."""


class ResumeError(ValueError):
    """The checkpoint cannot be resumed with these arguments."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """A checkpoint of this script."""

    path: str
    step: int
    acceptance_length: float

    @staticmethod
    def name(step: int, acceptance_length: float) -> str:
        return f"step-{step}-acceptance-{acceptance_length:.4f}"

    @staticmethod
    def parse(path: str) -> "DraftCheckpoint":
        """Parses a path. Raises ResumeError if it is not the path of a checkpoint of this script."""
        if (found := NAME.fullmatch(path.rpartition("/")[2])) is None:
            raise ResumeError(f"{path} is not a checkpoint of this script: these are named step-N-acceptance-A")
        return DraftCheckpoint(path, int(found[1]), float(found[2]))


@dataclass(frozen=True)
class Quality:
    """The quality of a draft.

    acceptance_length: tokens per pass of the target with greedy decoding: its own and the accepted draft tokens.
    accuracy: of the first draft token. loss: summed over draft tokens, per first draft token.
    """

    acceptance_length: float
    accuracy: float
    loss: float

    @staticmethod
    def from_metrics(metrics: Mapping[str, float]) -> "Quality":
        num_first = max(metrics["accuracy/1/of:sum"], 1.0)
        return Quality(
            metrics["acceptance_length/greedy:mean"], metrics["accuracy/1:mean"], metrics["loss:sum"] / num_first
        )

    def __str__(self) -> str:
        return f"acceptance length {self.acceptance_length:.4f}  accuracy {self.accuracy:.3f}  loss {self.loss:.4f}"


def main() -> None:
    options = parse_options()
    try:
        run(options)
    except ResumeError as error:
        print(f"draft.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(options: argparse.Namespace) -> None:
    first_step = DraftCheckpoint.parse(options.resume).step if options.resume else 0
    # A run that is resumed from this one finds the earlier ones by this.
    metadata = {"resumed": options.resume} if options.resume else None
    with ServiceClient(options.base_url, options.api_key, metadata) as service:
        draft = resumed(service, options) if options.resume else created(service, options)
        train, held_out = (list(texts(service, draft, options, split)) for split in ("train", "held_out"))
        if options.draft_vocab_size and not options.resume:
            build_vocab_map(draft, train)
        if options.captured:
            train, held_out = (capture(draft, each) for each in (train, held_out))
        checkpoints = earlier_checkpoints(service, options.resume)

        print(f"held-out {evaluate(draft, held_out, options.algorithm)}", flush=True)

        def evaluate_and_save(step: int) -> None:
            quality = evaluate(draft, held_out, options.algorithm)
            name = DraftCheckpoint.name(step, quality.acceptance_length)
            checkpoints.append(DraftCheckpoint.parse(draft.save_state(name, overwrite=True).result().path))
            print(f"step {step:3d}  held-out {quality}  saved {checkpoints[-1].path}", flush=True)

        draft.at_steps(options.eval_every, evaluate_and_save, num_steps=first_step)
        for step in range(first_step, options.steps):
            learning_rate = options.learning_rate * schedule(step, options.warmup, options.steps)
            quality = train_step(draft, batch(train, step, options.batch_size), options.algorithm, step, learning_rate)
            print(f"step {step + 1:3d}  learning rate {learning_rate:.2e}  {quality}", flush=True)
        if options.steps % options.eval_every and first_step < options.steps:
            evaluate_and_save(options.steps)
        if checkpoints:
            best = max(checkpoints, key=lambda each: each.acceptance_length)
            print(f"best: step {best.step}  acceptance length {best.acceptance_length:.4f}  {best.path}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--algorithm", choices=["eagle3", "dflash"], default="eagle3")
    parser.add_argument("--target-path", metavar="PATH", help="a checkpoint of a policy; left out: the bare base model")
    parser.add_argument(
        "--data",
        type=Path,
        default=PIRATE,
        help="rows for Datum.from_row, a JSON object per line; with --rollouts, each has a question",
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=0,
        help="train on answers sampled from the target, this many for each question, which"
        " works best; 0: train on the answers of the data",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled answers; 0: greedy")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each sampled answer")
    parser.add_argument("--draft-vocab-size", type=int, help="for eagle3: number of tokens, the most frequent")
    parser.add_argument(
        "--target-repr",
        choices=["hidden_state", "logits", "pruned_logits"],
        help="for eagle3: form in which the draft reads, and --captured stores, the target's distribution",
    )
    parser.add_argument(
        "--target-top-k", type=int, help="with pruned_logits: logits kept per token; default: those of its vocabulary"
    )
    parser.add_argument(
        "--captured", action="store_true", help="run the target once over all texts, and train on the stored features"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint that this script saved")
    return parser.parse_args()


def created(service: ServiceClient, options: argparse.Namespace) -> TrainingClient:
    return service.create_draft_client(
        options.model,
        options.algorithm,
        target_path=options.target_path,
        draft_vocab_size=options.draft_vocab_size,
        target_repr=options.target_repr,
        target_top_k=options.target_top_k,
        seed=0,
    )


def resumed(service: ServiceClient, options: argparse.Namespace) -> TrainingClient:
    """Returns the resumed draft with the target of this call's options, whose checkpoint may have moved since.

    Raises ResumeError if the checkpoint is not a draft's, or one of another algorithm or form of the target.
    """
    draft = service.create_training_client_from_state_with_optimizer(options.resume)
    info = draft.get_info()
    if info.draft is None:
        raise ResumeError(
            f"{options.resume} is a checkpoint of a {info.model_role}, not of a draft: resume that of a draft"
        )
    if (found := info.draft.algorithm) != options.algorithm:
        raise ResumeError(
            f"{options.resume} is of a draft of {found}, and --algorithm is {options.algorithm}: resume it with"
            f" --algorithm {found}"
        )
    for flag in ("target_repr", "target_top_k"):
        wanted, found = getattr(options, flag), getattr(info.draft, flag)
        if wanted not in (None, found):
            raise ResumeError(
                f"{options.resume} is of a draft with {flag} {found}, and --{flag.replace('_', '-')} is {wanted}: a"
                " resumed draft keeps its own, leave it out"
            )
    draft.set_target(options.target_path).result()
    return draft


def earlier_checkpoints(service: ServiceClient, resume: str | None) -> list[DraftCheckpoint]:
    """Returns the checkpoints up to the resumed one, by step, including those of the runs before it."""
    rest, found = service.create_rest_client(), []
    while resume:
        run_id, last_step = resume.removeprefix("tinker://").partition("/")[0], DraftCheckpoint.parse(resume).step
        paths = [each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints]
        listed = [DraftCheckpoint.parse(path) for path in paths if NAME.fullmatch(path.rpartition("/")[2])]
        found += [each for each in listed if each.step <= last_step]
        session = rest.get_session(run_id.partition(":")[0]).result()
        resume = (session.user_metadata or {}).get("resumed")
    return sorted(found, key=lambda each: each.step)


def texts(service: ServiceClient, draft: TrainingClient, options: argparse.Namespace, split: str) -> Iterator[Datum]:
    """Yields the training data. Tokens of answers have weight 1, tokens of questions 0."""
    tokenizer, asked = draft.get_tokenizer(), list(rows(options.data, split))
    if not options.rollouts:
        yield from (Datum.from_row(row, tokenizer) for row in asked)
        return
    prompts = [chat_prompt(tokenizer, row["question"]) for row in asked]
    for prompt, answers in zip(prompts, sampled(service, prompts, options), strict=True):
        yield from (answered(prompt, answer) for answer in answers)


def chat_prompt(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def answered(prompt: list[int], answer: list[int]) -> Datum:
    """Returns a datum that trains on the answer, including its end token; the prompt's positions have weight 0."""
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})


def sampled(
    service: ServiceClient, prompts: Sequence[list[int]], options: argparse.Namespace
) -> Iterator[list[list[int]]]:
    """Samples `--rollouts` answers to each prompt from the target. A resumed run has the same seeds and gets the same
    answers."""
    if options.target_path:
        target = service.create_sampling_client(model_path=options.target_path)
    else:
        target = service.create_sampling_client(base_model=options.model)
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    params = [SamplingParams(seed=seed, **fields) for seed in range(len(prompts))]
    futures = [target.sample(prompt, options.rollouts, each) for prompt, each in zip(prompts, params, strict=True)]
    return ([each.tokens.tolist() for each in future.result().sequences] for future in futures)


def build_vocab_map(draft: TrainingClient, data: Sequence[Datum]) -> None:
    tokens, weights = ([each.loss_fn_inputs[name] for each in data] for name in ("target_tokens", "weights"))
    counted = draft.build_vocab_map(tokens, weights).result()
    print(f"vocabulary of {counted.size} tokens: {counted.covered:.1%} of the tokens to predict", flush=True)


def capture(draft: TrainingClient, data: Sequence[Datum]) -> list[Datum]:
    captured = draft.capture(data).result()
    num_tokens = sum(len(each.tokens) for each in data)
    print(f"captured {num_tokens} tokens: {captured.num_bytes / num_tokens:.0f} bytes per token", flush=True)
    return list(captured)


def train_step(
    draft: TrainingClient, data: Sequence[Datum], algorithm: str, step: int, learning_rate: float
) -> Quality:
    """Returns the quality before the step. Both requests are sent at once; the server keeps their order."""
    adam = AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
    passed = draft.forward_backward(data, algorithm, loss_config(algorithm, step))
    stepped = draft.optim_step(adam, gradient_scale="mean")
    quality = Quality.from_metrics(passed.result().metrics)
    stepped.result()
    return quality


def evaluate(draft: TrainingClient, data: Sequence[Datum], algorithm: str) -> Quality:
    return Quality.from_metrics(draft.forward(data, algorithm, loss_config(algorithm, 0)).result().metrics)


def loss_config(algorithm: str, seed: int) -> dict[str, float]:
    """Returns a seed for dflash, which draws its anchors in long texts: the step, so that a resumed run draws the same
    ones."""
    return {"seed": seed} if algorithm == "dflash" else {}


if __name__ == "__main__":
    main()
