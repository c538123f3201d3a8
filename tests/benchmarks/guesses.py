"""Speculative sampling over HTTP with SmolLM2-135M-Instruct: a policy and its draft learn short answers, and the same
requests are sampled with the draft and without, taking turns."""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainhouse import AdamParams, Datum, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from trainhouse.examples.sft import PIRATE, answered, batch, chat_prompt, datum, schedule, train_step
from trainhouse.examples.sft import rows as questions
from trainhouse.server.cli.demo import MODEL, converted_model

from ..live import live_server
from .report import Line, Row, Section

POLICY_STEPS, DRAFT_STEPS = 40, 100
ROLLOUTS = 4  # of each question that is trained on
VOCABULARY = 4096
NUM_GUESSES = 4
LOSS = {"ttt_length": NUM_GUESSES}
MAX_TOKENS = 64
KINDS = {"greedy": 0.0, "sampled": 1.0}
"""What a draft's metrics call them -> temperature."""
ONE_BY_ONE = 6
LEAST_GAIN, LEAST_GAIN_TOGETHER = 1.2, 0.8
MOST_OFF = 0.1
"""Of what training says."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Setting:
    """is_seeded: then each sample is guessed as if it were alone."""

    kind: str
    together: bool
    is_seeded: bool


@dataclass(frozen=True)
class Sampled:
    """rate: tokens per second."""

    rate: float
    acceptance_length: float


def guesses(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    directory, threads = converted_model(), os.cpu_count() or 1
    with (
        live_server({MODEL: directory}, scratch / "guesses", pool=pool, threads=threads) as server,
        ServiceClient(server.url, "tml-bench") as service,
    ):
        policy = service.create_lora_training_client(MODEL, rank=8, seed=0)
        train, held_out = (_prompts(policy, split) for split in ("train", "held_out"))
        policy_path = _taught_policy(policy)
        sampler = service.create_sampling_client(model_path=policy_path)
        draft = service.create_draft_client(
            MODEL, "eagle3", target_path=policy_path, seed=1, draft_vocab_size=VOCABULARY
        )
        draft_path = _taught(draft, _texts(sampler, train, 1.0, ROLLOUTS))
        told = {kind: _told(draft, _texts(sampler, held_out, KINDS[kind], ROLLOUTS), kind) for kind in KINDS}
        found: dict[Setting, list[tuple[Sampled, Sampled]]] = {
            Setting(kind, *each): [] for kind in KINDS for each in ((False, True), (True, True), (True, False))
        }
        for turn in range(1 + rounds):
            for setting, pairs in found.items():
                prompts = held_out if setting.together else held_out[:ONE_BY_ONE]
                plain = _sampled(sampler, prompts, setting, turn, None)
                pair = plain, _sampled(sampler, prompts, setting, turn, draft_path)
                if turn:  # the first one loads, and warms up
                    pairs.append(pair)
    return _section(found, told, len(held_out))


def _prompts(client: TrainingClient, split: str) -> Prompts:
    return [chat_prompt(client.get_tokenizer(), row["question"]) for row in questions(PIRATE, split)]


def _taught_policy(policy: TrainingClient) -> str:
    """The path of its checkpoint."""
    data = [datum(policy.get_tokenizer(), row) for row in questions(PIRATE, "train")]
    for step in range(POLICY_STEPS):
        train_step(policy, batch(data, step, 8), 1e-3 * schedule(step, 4, POLICY_STEPS))
    return _path(policy)


def _texts(sampler: SamplingClient, prompts: Prompts, temperature: float, num_samples: int) -> list[Datum]:
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    futures = [sampler.sample(prompt, num_samples, each) for prompt, each in zip(prompts, params, strict=True)]
    return [
        answered(prompt, sequence.tokens.tolist())
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]


def _taught(draft: TrainingClient, texts: Sequence[Datum]) -> str:
    """The path of its checkpoint."""
    tokens, weights = ([each.loss_fn_inputs[name] for each in texts] for name in ("target_tokens", "weights"))
    draft.build_vocab_map(tokens, weights)
    data = draft.capture(texts).result()
    for step in range(DRAFT_STEPS):
        draft.forward_backward(batch(data, step, 16), "eagle3", LOSS)
        adam = AdamParams(learning_rate=1e-3 * schedule(step, 10, DRAFT_STEPS), grad_clip_norm=0.5)
        draft.optim_step(adam, gradient_scale="mean").result()
    return _path(draft)


def _path(client: TrainingClient) -> str:
    path = client.save_weights_for_sampler("taught").result().path
    assert path is not None
    return path


def _told(draft: TrainingClient, texts: Sequence[Datum], kind: str) -> float:
    """The acceptance length that training tells."""
    return draft.forward(texts, "eagle3", LOSS).result().metrics[f"acceptance_length/{kind}:mean"]


def _sampled(sampler: SamplingClient, prompts: Prompts, setting: Setting, turn: int, draft_path: str | None) -> Sampled:
    seed = 1000 + turn if setting.is_seeded else None
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=KINDS[setting.kind], seed=seed)
    drafted = {"draft_path": draft_path, "num_draft_tokens": NUM_GUESSES}
    started = time.perf_counter()
    if setting.together:
        responses = [each.result() for each in [sampler.sample(prompt, 1, params, **drafted) for prompt in prompts]]
    else:
        responses = [sampler.sample(prompt, 1, params, **drafted).result() for prompt in prompts]
    seconds = time.perf_counter() - started
    num_tokens = sum(len(response.sequences[0].tokens) for response in responses)
    fared = [response.guesses for response in responses if response.guesses is not None]
    passes = sum(each.passes for each in fared)
    return Sampled(num_tokens / seconds, 1 + sum(each.accepted for each in fared) / max(1, passes))


def _section(
    found: Mapping[Setting, Sequence[tuple[Sampled, Sampled]]], told: Mapping[str, float], num_held_out: int
) -> Section:
    table: list[Row] = []
    lines: list[Line] = []
    for setting, pairs in found.items():
        requests = f"{num_held_out} side by side" if setting.together else "one by one"
        name = f"temperature {KINDS[setting.kind]:g}, {requests}{', seeds given' if setting.is_seeded else ''}"
        gain = statistics.median(drafted.rate / plain.rate for plain, drafted in pairs)
        length = statistics.mean(drafted.acceptance_length for _, drafted in pairs)
        table.append(
            {
                "requests": name,
                "tokens/s without": statistics.median(plain.rate for plain, _ in pairs),
                "tokens/s with the draft": statistics.median(drafted.rate for _, drafted in pairs),
                "gain": gain,
                "tokens a pass": length,
                "as training says": told[setting.kind],
            }
        )
        if setting.together and setting.is_seeded:
            off = abs(length / told[setting.kind] - 1)
            lines.append(Line(f"{name}, tokens a pass off what training says", off, "at most", MOST_OFF))
        else:
            least = LEAST_GAIN_TOGETHER if setting.together else LEAST_GAIN
            lines.append(Line(f"{name}, tokens/s, times those without", gain, "at least", least))
    notes = [
        f"{MODEL} with a LoRA of rank 8 that has learnt short answers in {POLICY_STEPS} steps, and an eagle3 draft",
        f"of {VOCABULARY} tokens that has learnt {DRAFT_STEPS} steps of its answers; {NUM_GUESSES} guesses at a time.",
    ]
    return Section("Speculative sampling", table, lines, notes)
