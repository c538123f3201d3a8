"""Drafts: memory and time of a pass against draft tokens, vocabulary and length, online and from captured features, and
on two ranks; the forms in which a draft reads its target's distribution; and speculative sampling, where a policy and
its draft learn short answers.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from trainhouse import AdamParams, Datum, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from trainhouse.examples.draft import answered, chat_prompt
from trainhouse.examples.sft import PIRATE, batch, schedule, train_step
from trainhouse.examples.sft import rows as questions
from trainhouse.schemas import training
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.server.cli.demo import MODEL, converted_model
from trainhouse.workers.planner.drafts.draft_load import draft_load
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OptimizerStep
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.logit_budget import LogitBudget
from trainhouse.workers.shapes.model_shape import ModelShape, read_model

from ..live import live_server
from ..tiny import tiny_model
from ..workers.parallel.test_stored_features import referring
from .harness import KEY, THREADS, Line, Row, Rows, Section, Setup, in_turn, median_ratio
from .memory import MeasuredRun, measured_run
from .processes.workers import Cost

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 65536,
}
LARGE_VOCAB = 131072
TTT_LENGTHS = (1, 3, 7)
VOCABULARIES = (2048, 32768, LARGE_VOCAB)
LENGTH = 4096
LENGTHS = (8192, 16384, 32768)
LONGEST = LENGTHS[-1]
TTT_LENGTH = 3
RECOMPUTED = LENGTHS[1]
WARM_UP = 64
# What docs/performance.md states for this model.
KIB_PER_TOKEN: dict[Algorithm, int] = {"eagle3": 45, "dflash": 10}
KIB_PER_PREDICTION = 12
ROOMS_OF_LOGITS = 10
LAYOUT_TRIES = 2

Found = tuple[list[Row], list[Line]]


@dataclass(frozen=True)
class Target:
    """The model that drafts are trained for."""

    model: Path
    scratch: Path

    def draft(
        self,
        algorithm: Algorithm = "eagle3",
        spec: ParallelSpec = SINGLE,
        vocab_size: int | None = None,
        **options: Any,
    ) -> AbstractContextManager[MeasuredRun]:
        """options: of WorkerConfig."""
        config = DraftConfig(algorithm=algorithm, seed=3, draft_vocab_size=vocab_size)
        options = {"threads": THREADS} | options
        return measured_run(self.model, self.scratch, config, lesson(algorithm, WARM_UP, ttt_length=1), spec, **options)

    def cost(self, length: int, ttt_length: int = TTT_LENGTH, vocab_size: int | None = None) -> Cost:
        with self.draft(vocab_size=vocab_size) as draft:
            return draft.cost(lesson("eagle3", length, ttt_length=ttt_length))


def lesson(algorithm: Algorithm, *lengths: int, ttt_length: int = TTT_LENGTH) -> training.ForwardBackwardRequest:
    """Returns a pass over sequences of random tokens."""
    random = np.random.default_rng(sum(lengths))
    data = [training.Datum(random.integers(3, VOCABULARIES[0], length).astype(np.int32)) for length in lengths]
    options = {"ttt_length": ttt_length} if algorithm == "eagle3" else {"seed": 1}
    return training.ForwardBackwardRequest("run", 1, tuple(data), algorithm, options)


def drafts(setup: Setup) -> Section:
    target = Target(tiny_model("qwen3", setup.scratch / "draft-target", **SHAPE), setup.scratch)
    parts = [
        _by_ttt_length(target),
        _by_vocabulary(setup.scratch),
        _by_activations(target, setup.rounds),
        *(_by_length(algorithm, target, setup.rounds) for algorithm in KIB_PER_TOKEN),
        _by_layout(target),
    ]
    notes = [
        f"A Qwen3 of hidden {SHAPE['hidden_size']} and {SHAPE['num_hidden_layers']} layers in float32; eagle3 with a",
        f"ttt_length of {TTT_LENGTH} where none is named. Peak resident memory above that before the pass, forward and",
        "backward, each in fresh processes: of the rank that takes most.",
    ]
    lines = [line for _, found in parts for line in found]
    return Section("Drafts", [row for table, _ in parts for row in table], lines, notes)


def _by_ttt_length(target: Target) -> Found:
    costs = {ttt_length: target.cost(LENGTH, ttt_length) for ttt_length in TTT_LENGTHS}
    more = (costs[TTT_LENGTHS[-1]].growth - costs[TTT_LENGTHS[0]].growth) / (TTT_LENGTHS[-1] - TTT_LENGTHS[0])
    lines = [Line("a prediction of ttt_length, KiB per token", more / 1024 / LENGTH, "at most", KIB_PER_PREDICTION)]
    return [_row(f"ttt_length {ttt_length}", LENGTH, cost) for ttt_length, cost in costs.items()], lines


def _by_vocabulary(scratch: Path) -> Found:
    model = tiny_model("qwen3", scratch / "large-vocabulary-target", **(SHAPE | {"vocab_size": LARGE_VOCAB}))
    costs = {size: Target(model, scratch).cost(LENGTH, vocab_size=size) for size in VOCABULARIES}
    least, most = VOCABULARIES[0], VOCABULARIES[-1]
    growth, logits = costs[most].growth - costs[least].growth, 4 * LENGTH * TTT_LENGTH * (most - least)
    what = f"draft_vocab_size {most}, growth above {least} over the bytes of"
    lines = [
        Line(f"{what} a chunk of logits", growth / LogitBudget.max_bytes, "at most", ROOMS_OF_LOGITS),
        Line(f"{what} all logits", growth / logits, "at most", 0.2),
    ]
    return [_row(f"draft_vocab_size {size}", LENGTH, cost) for size, cost in costs.items()], lines


def _by_activations(target: Target, rounds: int) -> Found:
    """Measures the peaks of first passes, and the median seconds of the others."""
    work = lesson("eagle3", RECOMPUTED, ttt_length=TTT_LENGTHS[-1])
    with target.draft() as keep, target.draft(activations="recompute") as recompute:
        sides = {"keep": lambda: keep.cost(work), "recompute": lambda: recompute.cost(work)}
        found = in_turn(sides, 1 + max(1, rounds // 2))
    named = [f"ttt_length {TTT_LENGTHS[-1]}, {name}" for name in found]
    kept, recomputed = (
        Cost(costs[0].growth, statistics.median(each.seconds for each in costs[1:])) for costs in found.values()
    )
    lines = [
        Line(f"{named[1]}, times keep's peak", recomputed.growth / kept.growth, "at most", 0.85),
        Line(f"{named[1]}, times keep's seconds", recomputed.seconds / kept.seconds, "at most", 1.25),
    ]
    return [_row(name, RECOMPUTED, cost) for name, cost in zip(named, (kept, recomputed), strict=True)], lines


def _by_length(algorithm: Algorithm, target: Target, rounds: int) -> Found:
    table: list[Row] = []
    for length in LENGTHS:
        online, stored = _online_and_stored(algorithm, target, length, max(1, rounds * LENGTHS[0] // length))
        table += [_row(f"{algorithm}, online", length, online), _row(f"{algorithm}, stored", length, stored)]
    # Of the longest.
    lines = [
        Line(
            f"{algorithm}, {LONGEST} tokens, {name}, KiB per token",
            cost.growth / 1024 / LONGEST,
            "at most",
            KIB_PER_TOKEN[algorithm],
        )
        for name, cost in (("online", online), ("stored", stored))
    ]
    ratio = stored.seconds / online.seconds
    lines.append(Line(f"{algorithm}, {LONGEST} tokens, stored, times online's seconds", ratio, "at most", 1.0))
    return table, lines


def _online_and_stored(algorithm: Algorithm, target: Target, length: int, rounds: int) -> tuple[Cost, Cost]:
    """Returns the peaks of two processes, and the median seconds of rounds in turn in one of them."""
    work = lesson(algorithm, length)
    with target.draft(algorithm) as draft:
        online = draft.cost(work)
        stored_work = referring(draft.where, work, target.scratch / "features")
    with target.draft(algorithm) as draft:
        stored = draft.cost(stored_work)
        sides = {name: lambda each=each: draft.cost(each).seconds for name, each in ((0, work), (1, stored_work))}
        seconds = [statistics.median(of_side) for of_side in in_turn(sides, rounds).values()]
    return Cost(online.growth, seconds[0]), Cost(stored.growth, seconds[1])


def _by_layout(target: Target) -> Found:
    """tp gives each sequence to one rank, so a single one keeps only one busy."""
    whole, halves = (LONGEST,), (LONGEST // 2,) * 2
    of_one = {lengths: _layout_cost(target, "single", lengths) for lengths in (whole, halves)}
    table = [_row(f"one rank, {_named(lengths)}", LONGEST, cost) for lengths, cost in of_one.items()]
    lines = []
    for layout, lengths, share in (("sp=2", whole, 0.65), ("tp=2", halves, 0.65), ("tp=2", whole, 1.25)):
        name, cost = f"{layout}, {_named(lengths)}", _layout_cost(target, layout, lengths)
        table.append(_row(name, LONGEST, cost))
        lines.append(Line(f"{name}, times one rank's peak", cost.growth / of_one[lengths].growth, "at most", share))
    return table, lines


def _layout_cost(target: Target, layout: str, lengths: tuple[int, ...]) -> Cost:
    """Measures one micro-batch, a thread for each rank. The largest of several tries: some allocators are lucky."""

    def once() -> Cost:
        with target.draft(spec=ParallelSpec.parse(layout), threads=1, micro_batch_tokens=LONGEST) as draft:
            return draft.cost(lesson("eagle3", *lengths))

    return max((once() for _ in range(LAYOUT_TRIES)), key=lambda cost: cost.growth)


def _named(lengths: Sequence[int]) -> str:
    return f"{len(lengths)}x{lengths[0]}"


# What ranks keep of a draft

STATE_SHAPE = SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 16384}
STATE_LAYOUTS = ("single", "sp=2", "fsdp=2,sp=2")
STEP_TOKENS = 64
# Bytes per parameter: in bfloat16; and float32 weights, pending gradients and moments, divided over the ranks.
LEAST_BYTES, DIVIDED_BYTES = 2, 4 + 4 + 8
MOST_ABOVE = 1.02


def draft_memory(setup: Setup) -> Section:
    model = tiny_model("qwen3", setup.scratch / "draft-memory-target", **STATE_SHAPE)
    target, table, lines = Target(model, setup.scratch), list[Row](), list[Line]()
    for layout in STATE_LAYOUTS:
        spec = ParallelSpec.parse(layout)
        with target.draft(spec=spec, dtype="bfloat16", threads=1) as draft:
            seconds = statistics.median(_step_seconds(draft) for _ in range(1 + setup.rounds))
            draft.cost(lesson("eagle3", STEP_TOKENS, ttt_length=1))
            held = max(each["drafts_on_device"] for each in draft.where.answers("memory"))
        num_parameters = sum(map(prod, _shapes(model).values()))
        per_parameter, wanted = held / num_parameters, LEAST_BYTES + DIVIDED_BYTES / spec.num_ranks
        table.append({
            "layout": layout,
            "MiB of a rank": held / 2**20,
            "bytes per parameter": per_parameter,
            "step, ms": 1000 * seconds,
        })  # fmt: skip
        what = f"{layout}, what a rank keeps, times {wanted:g} bytes per parameter"
        lines.append(Line(what, per_parameter / wanted, "at most", MOST_ABOVE))
    notes = [
        f"An eagle3 draft of {num_parameters / 1e6:.1f} million parameters in bfloat16, after steps and with pending",
        "gradients. A step: of AdamW, with the exchange of weights; the median. One thread for each rank.",
    ]
    return Section("What ranks keep of a draft", table, lines, notes)


def _step_seconds(draft: MeasuredRun) -> float:
    draft.cost(lesson("eagle3", STEP_TOKENS, ttt_length=1))
    started = time.perf_counter()
    (metrics,) = draft.where.call("apply_steps", (OptimizerStep("run", training.AdamParams()),))
    assert isinstance(metrics, dict), metrics
    return time.perf_counter() - started


def _shapes(model: Path) -> Mapping[str, tuple[int, ...]]:
    shape = read_model(ServedModel("m", str(model)))
    assert isinstance(shape, ModelShape)
    return draft_load(shape, "eagle3", {}, Workload(longest=STEP_TOKENS)).shapes()


def _row(what: str, tokens: int, cost: Cost) -> Row:
    return {
        "what": what,
        "tokens": tokens,
        "MiB": cost.growth / 2**20,
        "KiB per token": cost.growth / 1024 / tokens,
        "seconds": cost.seconds,
    }


# The forms of the target's distribution, with SmolLM2-135M-Instruct

FORMS: dict[str, dict[str, Any]] = {
    "hidden_state": {},
    "logits": {"target_repr": "logits"},
    "pruned_logits of the vocabulary": {"target_repr": "pruned_logits"},
    "pruned_logits, top 64": {"target_repr": "pruned_logits", "target_top_k": 64},
    "pruned_logits, top 4": {"target_repr": "pruned_logits", "target_top_k": 4},
}
FORM_STEPS, FORM_BATCH = 40, 8
EXACT_OFF, TOP_LOSS = 0.002, 0.02
"""The largest differences from hidden_state's acceptance length, as shares of it."""


@dataclass(frozen=True)
class OfForm:
    """token_bytes: captured. *_seconds: for all captured tokens; medians of a step, online and with captured features.
    acceptance_lengths: on held-out answers after the same training, by kind, against the exact distribution.
    """

    token_bytes: float
    capture_seconds: float
    online_seconds: float
    stored_seconds: float
    acceptance_lengths: Mapping[str, float]


def target_forms(setup: Setup) -> Section:
    models = {MODEL: converted_model()}
    with (
        live_server(models, setup.scratch / "forms", setup.pool, threads=THREADS) as server,
        ServiceClient(server.url, KEY) as service,
    ):
        tokenizer_of = service.create_lora_training_client(MODEL, rank=1, seed=0)
        train, held_out = (_prompts(tokenizer_of, split) for split in ("train", "held_out"))
        sampler = service.create_sampling_client(base_model=MODEL)
        texts = _answers(sampler, train, 1.0, 1)
        judged = {kind: _answers(sampler, held_out, temperature, 1) for kind, temperature in KINDS.items()}
        found = {name: _of_form(service, fields, texts, judged) for name, fields in FORMS.items()}
    num_tokens = sum(len(each.tokens) for each in texts)
    table: list[Row] = [
        {
            "form": name,
            "bytes per token": each.token_bytes,
            "capture, ms per token": 1000 * each.capture_seconds / num_tokens,
            "step online, s": each.online_seconds,
            "step stored, s": each.stored_seconds,
            **{f"tokens per pass, {kind}": length for kind, length in each.acceptance_lengths.items()},
        }
        for name, each in found.items()
    ]
    first, *others = found
    lines = [
        Line(
            f"{name}, {kind} tokens per pass off hidden_state's",
            abs(found[name].acceptance_lengths[kind] / found[first].acceptance_lengths[kind] - 1),
            "at most",
            TOP_LOSS if "top" in name else EXACT_OFF,
        )
        for name in others[:-1]
        for kind in KINDS
    ]
    notes = [
        f"{MODEL} is the target, in float32; eagle3 of {VOCABULARY} tokens, trained for {FORM_STEPS} steps of",
        f"{FORM_BATCH} sampled answers, from features after the first three steps; judged with hidden_state.",
    ]
    return Section("Forms of the target's distribution", table, lines, notes)


def _of_form(
    service: ServiceClient, fields: Mapping[str, Any], texts: Sequence[Datum], judged: Mapping[str, Sequence[Datum]]
) -> OfForm:
    draft, judge = (
        service.create_draft_client(MODEL, "eagle3", seed=1, draft_vocab_size=VOCABULARY, **each)
        for each in (fields, {})
    )
    tokens, weights = ([each.loss_fn_inputs[name] for each in texts] for name in ("target_tokens", "weights"))
    draft.build_vocab_map(tokens, weights).result()
    started = time.perf_counter()
    captured = draft.capture(texts).result()
    capture_seconds = time.perf_counter() - started
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(FORM_STEPS):
        is_stored = step >= 3
        started = time.perf_counter()
        data = batch(captured if is_stored else texts, step, FORM_BATCH)
        draft.forward_backward(data, "eagle3", LOSS).result()
        seconds[is_stored].append(time.perf_counter() - started)
        adam = AdamParams(learning_rate=1e-3 * schedule(step, 10, FORM_STEPS), grad_clip_norm=0.5)
        draft.optim_step(adam, gradient_scale="mean").result()
    draft.release_features().result()
    judge.load_state(draft.save_state("learnt").result().path or "").result()
    lengths = {kind: _acceptance_length(judge, answers, kind) for kind, answers in judged.items()}
    num_tokens = sum(len(each.tokens) for each in texts)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return OfForm(captured.num_bytes / num_tokens, capture_seconds, medians[False], medians[True], lengths)


# Speculative sampling, with SmolLM2-135M-Instruct

POLICY_STEPS, DRAFT_STEPS = 40, 100
ROLLOUTS = 4  # of each question that is trained on
VOCABULARY = 4096
NUM_DRAFT_TOKENS = 4
LOSS = {"ttt_length": NUM_DRAFT_TOKENS}
MAX_TOKENS = 64
KINDS = {"greedy": 0.0, "sampled": 1.0}
"""Names in a draft's metrics -> temperature."""
ONE_BY_ONE = 6
LEAST_GAIN, LEAST_GAIN_TOGETHER = 1.2, 0.8
MAX_OFF = 0.1
"""The largest difference from training's acceptance length, as a share of it."""


@dataclass(frozen=True)
class Case:
    """is_seeded: each sample then gets as many draft tokens as if it were alone."""

    kind: str
    together: bool
    is_seeded: bool


@dataclass(frozen=True)
class Sampled:
    """rate: tokens per second."""

    rate: float
    acceptance_length: float


def speculation(setup: Setup) -> Section:
    models = {MODEL: converted_model()}
    with (
        live_server(models, setup.scratch / "speculation", setup.pool, threads=THREADS) as server,
        ServiceClient(server.url, KEY) as service,
    ):
        policy = service.create_lora_training_client(MODEL, rank=8, seed=0)
        train, held_out = (_prompts(policy, split) for split in ("train", "held_out"))
        policy_path = _train_policy(policy)
        sampler = service.create_sampling_client(model_path=policy_path)
        draft = service.create_draft_client(
            MODEL, "eagle3", target_path=policy_path, seed=1, draft_vocab_size=VOCABULARY
        )
        draft_path = _train_draft(draft, _answers(sampler, train, 1.0, ROLLOUTS))
        expected = {
            kind: _acceptance_length(draft, _answers(sampler, held_out, temperature, ROLLOUTS), kind)
            for kind, temperature in KINDS.items()
        }
        cases = [Case(kind, *each) for kind in KINDS for each in ((False, True), (True, True), (True, False))]
        sides = {
            (case, path): _side(sampler, held_out if case.together else held_out[:ONE_BY_ONE], case, path)
            for case in cases
            for path in (None, draft_path)
        }
        # The first round loads.
        found = in_turn(sides, setup.rounds, warm_ups=1)
    pairs = {case: (found[case, None], found[case, draft_path]) for case in cases}
    return _section(pairs, expected, len(held_out))


def _prompts(client: TrainingClient, split: str) -> Rows:
    return [chat_prompt(client.get_tokenizer(), row["question"]) for row in questions(PIRATE, split)]


def _train_policy(policy: TrainingClient) -> str:
    """Returns the path of its checkpoint."""
    data = [Datum.from_row(row, policy.get_tokenizer()) for row in questions(PIRATE, "train")]
    for step in range(POLICY_STEPS):
        train_step(policy, batch(data, step, 8), 1e-3 * schedule(step, 4, POLICY_STEPS))
    return _saved(policy)


def _answers(sampler: SamplingClient, prompts: Rows, temperature: float, num_samples: int) -> list[Datum]:
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    futures = [sampler.sample(prompt, num_samples, each) for prompt, each in zip(prompts, params, strict=True)]
    return [
        answered(prompt, sequence.tokens.tolist())
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]


def _train_draft(draft: TrainingClient, texts: Sequence[Datum]) -> str:
    """Returns the path of its checkpoint."""
    tokens, weights = ([each.loss_fn_inputs[name] for each in texts] for name in ("target_tokens", "weights"))
    draft.build_vocab_map(tokens, weights)
    data = draft.capture(texts).result()
    for step in range(DRAFT_STEPS):
        draft.forward_backward(batch(data, step, 16), "eagle3", LOSS)
        adam = AdamParams(learning_rate=1e-3 * schedule(step, 10, DRAFT_STEPS), grad_clip_norm=0.5)
        draft.optim_step(adam, gradient_scale="mean").result()
    return _saved(draft)


def _saved(client: TrainingClient) -> str:
    path = client.save_weights_for_sampler("taught").result().path
    assert path is not None
    return path


def _acceptance_length(draft: TrainingClient, texts: Sequence[Datum], kind: str) -> float:
    """Returns what the metrics of training report."""
    return draft.forward(texts, "eagle3", LOSS).result().metrics[f"acceptance_length/{kind}:mean"]


def _side(sampler: SamplingClient, prompts: Rows, case: Case, draft_path: str | None) -> Callable[[], Sampled]:
    seeds = count(1000)

    def sample() -> Sampled:
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=KINDS[case.kind], seed=next(seeds) if case.is_seeded else None
        )
        drafted = {"draft_path": draft_path, "num_draft_tokens": NUM_DRAFT_TOKENS}
        futures = (sampler.sample(prompt, 1, params, **drafted) for prompt in prompts)
        started = time.perf_counter()
        # A list sends all requests before the first result is awaited.
        responses = [future.result() for future in (list(futures) if case.together else futures)]
        seconds = time.perf_counter() - started
        num_tokens = sum(len(response.sequences[0].tokens) for response in responses)
        counts = [response.guesses for response in responses if response.guesses is not None]
        passes = sum(each.passes for each in counts)
        return Sampled(num_tokens / seconds, 1 + sum(each.accepted for each in counts) / max(1, passes))

    return sample


def _section(
    pairs: Mapping[Case, tuple[Sequence[Sampled], Sequence[Sampled]]], expected: Mapping[str, float], num_held_out: int
) -> Section:
    table: list[Row] = []
    lines: list[Line] = []
    for case, (plain, drafted) in pairs.items():
        requests = f"{num_held_out} side by side" if case.together else "one by one"
        name = f"temperature {KINDS[case.kind]:g}, {requests}{', seeds given' if case.is_seeded else ''}"
        rates = [[each.rate for each in side] for side in (plain, drafted)]
        gain = median_ratio(rates[1], rates[0])
        length = statistics.mean(each.acceptance_length for each in drafted)
        table.append(
            {
                "requests": name,
                "tokens/s without": statistics.median(rates[0]),
                "tokens/s with the draft": statistics.median(rates[1]),
                "gain": gain,
                "tokens a pass": length,
                "as training says": expected[case.kind],
            }
        )
        if case.together and case.is_seeded:
            off = abs(length / expected[case.kind] - 1)
            lines.append(Line(f"{name}, tokens a pass off what training says", off, "at most", MAX_OFF))
        else:
            least = LEAST_GAIN_TOGETHER if case.together else LEAST_GAIN
            lines.append(Line(f"{name}, tokens/s, times those without", gain, "at least", least))
    notes = [
        f"{MODEL} with a LoRA of rank 8 that has learnt short answers in {POLICY_STEPS} steps, and an eagle3 draft",
        f"of {VOCABULARY} tokens that has learnt {DRAFT_STEPS} steps of its answers; {NUM_DRAFT_TOKENS} draft tokens",
        "at a time.",
    ]
    return Section("Speculative sampling", table, lines, notes)
