"""Tests that the sampler's log-probabilities equal those of the trainer's forward of the same adapter.

Some 200 random requests with every option join and leave at random, in slices of one iteration; the trainer then runs
each prompt with its sample.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import Constraint, SampledSequence, SampleResponse
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import (
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
    SliceResult,
)
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...letters import letter_tokenizer
from ...tiny import tiny_model
from ..jobs import MAX_SLICES, answers, job

# Small enough that the trainer can return the whole distribution at every position.
VOCAB, CONTEXT = 64, 512
NUM_REQUESTS, MAX_ACTIVE = 200, 40
pytestmark = pytest.mark.slow

LONGEST_PROMPT = 200
TOLERANCE = 1e-4

# One token's bytes: 2 layers, 2 key/value heads of 16 float32 numbers, keys and values.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
BUDGETS = {"small": 3 * CONTEXT * BYTES_PER_TOKEN, "large": 1 << 30}

TRAINED = {
    "attention": LoraConfig(rank=1, seed=1, train_mlp=False, train_unembed=False),
    "all": LoraConfig(rank=6, seed=2),
    "wide": LoraConfig(rank=16, seed=3, train_unembed=False),
}
ADJUSTING: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.2},
    {"logit_bias": {5: 4.0, 6: -100.0}},
    {"constraint": Constraint(regex="[A-Z0-9]{1,60}")},
)
"""Options that change which tokens are drawn, but not the reported log-probabilities."""
BARE = "bare"
"""A run that is never trained, which stands for the base model in the trainer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model("qwen3", tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    letter_tokenizer(VOCAB).save_pretrained(directory)
    return directory


def trained_worker(model: Path, kv_cache_bytes: int) -> Worker:
    """Returns a worker with a run for each of TRAINED, and a sampler's copy of each under the same name."""
    served = ServedModel("tiny", str(model))
    limits: dict[str, Any] = {"max_context_length": CONTEXT, "kv_cache_bytes": kv_cache_bytes}
    worker = Worker(WorkerConfig(served, device="cpu", threads=1, max_lora_rank=16, **limits))
    worker.create_run(RunSpec(BARE, LoraConfig(rank=1, seed=1)))
    for name, lora in TRAINED.items():
        worker.create_run(RunSpec(name, lora))
        for _ in range(6):
            train(worker, name)
        worker.copy_adapter(name, name)
    return worker


def train(worker: Worker, run_id: str) -> None:
    """Trains one step on rows that differ between runs."""
    rows = np.random.default_rng(len(run_id)).integers(0, VOCAB, (6, 25))
    data = tuple(Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in rows)
    (output,) = worker.run_pass((OperationPart(0, ForwardBackwardRequest(run_id, 1, data, "cross_entropy")),))
    assert isinstance(output, ForwardBackwardOutput), output
    (metrics,) = worker.apply_steps((OptimizerStep(run_id, AdamParams(learning_rate=2e-2)),))
    assert isinstance(metrics, dict), metrics


def trainer_logprobs(worker: Worker, run_id: str, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns float32 [len - 1, VOCAB] for each sequence: row i is the distribution of token i + 1."""
    data = tuple(Datum(tokens[:-1], {"target_tokens": every_token(len(tokens) - 1)}) for tokens in sequences)
    request = ForwardBackwardRequest(run_id, 1, data, "cross_entropy", forward_only=True)
    (output,) = worker.run_pass((OperationPart(0, request),))
    assert isinstance(output, ForwardBackwardOutput), output
    return [each["logprobs"] for each in output.loss_fn_outputs]


def every_token(length: int) -> np.ndarray:
    return np.tile(np.arange(VOCAB), (length, 1))


class Traffic:
    """Generates random requests: new prompts, prompts that begin like earlier ones, and next turns of conversations."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.continuable: list[tuple[SampleJob, SampleResponse]] = []
        self._prompts: list[np.ndarray] = []
        self._cancelled_at: dict[int, set[str]] = defaultdict(set)

    def next_slice(self, number: int, active: Collection[str], most_more: int) -> SamplingSlice:
        """Adds a few requests and cancels every tenth some slices later unless it is done by then."""
        wants_more = len(active) < min(MAX_ACTIVE, most_more)
        join = tuple(self._next_job() for _ in range(self.random.integers(0, 9) if wants_more else 0))
        for one in join:
            if self.random.random() < 0.1:
                self._cancelled_at[number + int(self.random.integers(1, 16))].add(one.job_id)
        return SamplingSlice(join, tuple(self._cancelled_at[number] & set(active)), 0)

    def _next_job(self) -> SampleJob:
        adapter_id, prompt = self._adapter_and_prompt()
        self._prompts.append(prompt)
        return job(f"job{len(self._prompts)}", prompt, adapter_id, **self._options(len(prompt)))

    def _pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def _adapter_and_prompt(self) -> tuple[str | None, np.ndarray]:
        adapter_id, kind = self._pick(None, *TRAINED), self.random.random()
        if kind < 0.4 and self.continuable:
            earlier, response = self.continuable[self.random.integers(len(self.continuable))]
            adapter_id, start = earlier.adapter_id, np.concatenate([earlier.prompt, response.sequences[-1].tokens])
        elif kind < 0.75 and self._prompts:
            start = self._prompts[self.random.integers(len(self._prompts))]
            start = start[: self.random.integers(len(start) + 1)]
        else:
            start = self._tokens(int(self.random.integers(1, 120)))
        # No further token after a start gives the same prompt as another request's.
        more = self._tokens(int(self.random.integers(0 if len(start) else 1, 40)))
        return adapter_id, np.concatenate([start, more])[:LONGEST_PROMPT]

    def _tokens(self, length: int) -> np.ndarray:
        return self.random.integers(0, VOCAB, length).astype(np.int32)

    def _limit(self, length: int) -> dict[str, object]:
        wanted = self._pick(*range(1, 25), 200, 250, 300, None)
        return {"max_tokens": min(wanted or CONTEXT, CONTEXT - length), "fills_context": wanted is None}

    def _options(self, length: int) -> dict[str, object]:
        scored = bool(self._pick(False, False, True))
        targets = self.random.integers(-1, VOCAB, (length - 1, 3)) if self._pick(False, False, True) else None
        last_n = int(self.random.integers(1, length)) if scored and length > 1 and self._pick(False, True) else None
        return {
            "num_samples": self._pick(1, 1, 1, 1, 3),
            **self._limit(length),
            "seed": int(self.random.integers(1 << 40)),
            "temperature": self._pick(0.0, 0.5, 1.0, 1.0, 1.6),
            "top_k": self._pick(-1, -1, 1, 4, 20),
            "top_p": self._pick(1.0, 1.0, 0.5, 0.9),
            "min_p": self._pick(0.0, 0.0, 0.0, 0.2),
            "min_tokens": self._pick(0, 0, 0, 5),
            **self._pick({}, {}, {}, *ADJUSTING),
            "stop_strings": self._pick((), (), ("A",), ("E", "7X")),
            "stop_token_ids": tuple(self._tokens(self._pick(0, 0, 0, 3)).tolist()),
            "prompt_logprobs": scored,
            "prompt_logprobs_last_n": last_n,
            "topk_prompt_logprobs": self._pick(0, 0, 3),
            "topk_sample_logprobs": self._pick(0, 0, 2, 7),
            "target_prompt_tokens": targets,
            "prompt_alt_tokens_k": self._pick(0, 0, 2),
            "streams": self._pick(False, True, True),
        }


@dataclass
class Served:
    """Holds the answers to the traffic.

    num_stalls: how often a slice had no token for a sample that had begun to stream.
    """

    worker: Worker
    active: dict[str, SampleJob] = field(default_factory=dict)
    answers: list[tuple[SampleJob, SampleResponse]] = field(default_factory=list)
    num_cancelled: int = 0
    num_stalls: int = 0
    _streaming: set[str] = field(default_factory=set)

    def take(self, work: SamplingSlice, result: SliceResult) -> list[tuple[SampleJob, SampleResponse]]:
        """Records a slice and returns the jobs that finished, with their answers."""
        self.active |= {one.job_id: one for one in work.join}
        for name in work.cancel:
            del self.active[name]
        self.num_cancelled += len(work.cancel)
        finished = [(self.active.pop(name), answer) for name, answer in result.finished.items()]
        assert all(isinstance(answer, SampleResponse) for _, answer in finished), finished
        assert result.num_active == len(self.active)
        self.answers += finished
        self._count_stalls(result)
        return finished

    def _count_stalls(self, result: SliceResult) -> None:
        """Counts jobs of one sample only: of several, some may have ended, and no slice reports that."""
        self._streaming &= self.active.keys()
        self.num_stalls += len(self._streaming - result.progress.keys())
        self._streaming |= {name for name in result.progress if self.active[name].num_samples == 1}

    @cached_property
    def scored(self) -> list["Scored"]:
        return self.scored_by({None: BARE} | {name: name for name in TRAINED})

    def scored_by(self, run_of_adapter: dict[str | None, str]) -> list["Scored"]:
        """Returns every sample with the trainer's distributions of the run given for its adapter."""
        found = []
        for adapter_id, run_id in run_of_adapter.items():
            of_adapter = [(job, response) for job, response in self.answers if job.adapter_id == adapter_id]
            samples = [(job, response, sequence) for job, response in of_adapter for sequence in response.sequences]
            wholes = [np.concatenate([job.prompt, sequence.tokens]) for job, _, sequence in samples]
            rows = trainer_logprobs(self.worker, run_id, wholes)
            found += [Scored(*sample, whole) for sample, whole in zip(samples, rows, strict=True)]
        return found


@dataclass(frozen=True, eq=False)
class Scored:
    """A sample with the trainer's distributions.

    rows: float32 [len(prompt) + len(sample) - 1, VOCAB]; row i is the distribution of token i + 1.
    """

    job: SampleJob
    response: SampleResponse
    sequence: SampledSequence
    rows: np.ndarray

    @property
    def prompt_rows(self) -> np.ndarray:
        return self.rows[: len(self.job.prompt) - 1]

    @property
    def sample_rows(self) -> np.ndarray:
        return self.rows[len(self.job.prompt) - 1 :]

    def sample_differences(self) -> np.ndarray:
        return abs(self.sequence.logprobs - logprobs_of(self.sample_rows, self.sequence.tokens))


def logprobs_of(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(rows, tokens[:, None].astype(np.int64), axis=1)[:, 0]


def serve(worker: Worker, seed: int) -> Served:
    traffic, served = Traffic(seed), Served(worker)
    for number in range(MAX_SLICES):
        work = traffic.next_slice(number, served.active, NUM_REQUESTS - len(served.answers))
        finished = served.take(work, worker.sample_slice(work))
        traffic.continuable += finished
        if len(served.answers) >= NUM_REQUESTS and not served.active:
            return served
    raise AssertionError(f"{len(served.active)} jobs are still active after {MAX_SLICES} slices")


@pytest.fixture(scope="module")
def all_served(model: Path) -> dict[str, Served]:
    return {name: serve(trained_worker(model, budget), seed=8) for name, budget in BUDGETS.items()}


@pytest.fixture(params=BUDGETS)
def served(request: pytest.FixtureRequest, all_served: dict[str, Served]) -> Served:
    return all_served[request.param]


def test_traffic_covers_every_option_and_a_small_cache_preempts(all_served: dict[str, Served]) -> None:
    for served in all_served.values():
        jobs = [job for job, _ in served.answers]
        assert len(jobs) >= NUM_REQUESTS and served.num_cancelled > 3
        assert {job.adapter_id for job in jobs} == {None, *TRAINED}
        assert sum(bool(job.stop_strings) for job in jobs) > 50
        assert sum(job.params.constraint is not None for job in jobs) > 10
        lengths = [len(job.prompt) for job in jobs]
        assert min(lengths) < 20 and max(lengths) > 150
        reasons = [sequence.stop_reason for _, response in served.answers for sequence in response.sequences]
        assert min(reasons.count("stop"), reasons.count("length")) > 10
    assert all_served["small"].num_stalls > 20 + 2 * all_served["large"].num_stalls


def test_sampled_token_logprobs_equal_the_trainers(served: Served) -> None:
    assert max(scored.sample_differences().max() for scored in served.scored) < TOLERANCE


def test_logprobs_of_another_adapter_differ(served: Served) -> None:
    names = [None, *TRAINED]
    others = served.scored_by(dict(zip(names, [*TRAINED, BARE], strict=True)))
    for name in names:
        differences = np.concatenate([each.sample_differences() for each in others if each.job.adapter_id == name])
        assert np.median(differences) > 500 * TOLERANCE and differences.max() > 0.5


def test_logprobs_ignore_the_requests_temperature(served: Served) -> None:
    differences = []
    for scored in served.scored:
        temperature = scored.job.params.temperature
        if temperature in (0, 1):
            continue
        scaled = torch.from_numpy(scored.sample_rows / temperature).log_softmax(-1).numpy()
        differences.append(abs(scored.sequence.logprobs - logprobs_of(scaled, scored.sequence.tokens)))
    assert np.median(np.concatenate(differences)) > 500 * TOLERANCE


def test_prompt_logprobs_equal_the_trainers(served: Served) -> None:
    num_scored = 0
    for scored in served.scored:
        found, length = scored.response.prompt_logprobs, len(scored.job.prompt)
        assert (found is not None) == scored.job.prompt_logprobs
        if found is None:
            continue
        first = length - (scored.job.prompt_logprobs_last_n or length - 1)
        assert np.isnan(found[:first]).all()
        wanted = logprobs_of(scored.prompt_rows, scored.job.prompt[1:])
        np.testing.assert_allclose(found[first:], wanted[first - 1 :], rtol=0, atol=TOLERANCE)
        num_scored += 1
    assert num_scored > 20


def test_target_and_alternative_prompt_logprobs_equal_the_trainers(served: Served) -> None:
    num_given = num_drawn = 0
    for scored in served.scored:
        given, asked = scored.response.target_prompt_logprobs, scored.job.target_prompt_tokens
        if given is not None and asked is not None:
            wanted = np.take_along_axis(scored.prompt_rows, np.maximum(asked, 0), axis=1)
            np.testing.assert_allclose(given, np.where(asked < 0, 0, wanted), rtol=0, atol=TOLERANCE)
            num_given += 1
        drawn, logprobs = scored.response.prompt_alt_tokens, scored.response.prompt_alt_logprobs
        if drawn is not None and logprobs is not None:
            wanted = np.take_along_axis(scored.prompt_rows, drawn.astype(np.int64), axis=1)
            np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=TOLERANCE)
            num_drawn += 1
    assert min(num_given, num_drawn) > 20


def test_topk_tokens_and_logprobs_equal_the_trainers(served: Served) -> None:
    num_of_samples = num_of_prompts = 0
    for scored in served.scored:
        top = scored.sequence.topk_logprobs
        assert (top is not None) == (scored.job.topk_sample_logprobs > 0)
        if top is not None:
            assert_likeliest(top.token_ids, top.logprobs, scored.sample_rows, scored.job.topk_sample_logprobs)
            num_of_samples += 1
        top = scored.response.topk_prompt_logprobs
        if top is not None:
            first = len(scored.job.prompt) - (scored.job.prompt_logprobs_last_n or len(scored.job.prompt) - 1)
            rows = scored.prompt_rows[first - 1 :]
            assert_likeliest(top.token_ids[first:], top.logprobs[first:], rows, scored.job.topk_prompt_logprobs)
            num_of_prompts += 1
    assert min(num_of_samples, num_of_prompts) > 20


def assert_likeliest(token_ids: np.ndarray, logprobs: np.ndarray, rows: np.ndarray, k: int) -> None:
    """Allows tokens that are equally likely up to rounding to swap places."""
    assert all(len(set(ids)) == k for ids in token_ids.tolist())
    np.testing.assert_allclose(logprobs, -np.sort(-rows, axis=1)[:, :k], rtol=0, atol=TOLERANCE)
    wanted = np.take_along_axis(rows, token_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=TOLERANCE)


def test_sampled_tokens_pass_their_filters(served: Served) -> None:
    """Checks requests without the options that change the distribution."""
    num_greedy = num_drawn = 0
    for scored in served.scored:
        params, logprobs = scored.job.params, scored.sequence.logprobs
        if params.min_tokens or any(getattr(params, name) == each[name] for each in ADJUSTING for name in each):
            continue
        falling = -np.sort(-scored.sample_rows, axis=1)
        if params.temperature == 0 or params.top_k == 1:
            np.testing.assert_allclose(logprobs, falling[:, 0], rtol=0, atol=TOLERANCE)
            num_greedy += 1
            continue
        scaled = torch.from_numpy(falling / params.temperature).softmax(-1).numpy()
        scaled[scaled < (params.min_p - TOLERANCE) * scaled[:, :1]] = 0
        kept = params.top_k if params.top_k > 0 else VOCAB
        shares = scaled[:, :kept] / scaled[:, :kept].sum(-1, keepdims=True)
        num_kept = ((shares > 0) & (shares.cumsum(-1) - shares < params.top_p + TOLERANCE)).sum(-1)
        assert (logprobs > falling[np.arange(len(falling)), num_kept - 1] - TOLERANCE).all()
        num_drawn += 1
    assert min(num_greedy, num_drawn) > 15


# peft calls it in transformers.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("run_id", [name for name, lora in TRAINED.items() if not lora.train_unembed])
def test_greedy_tokens_of_a_trained_adapter_equal_peft_generate(
    all_served: dict[str, Served], model: Path, tmp_path: Path, run_id: str
) -> None:
    worker = all_served["large"].worker
    worker.save_run(run_id, str(tmp_path), optimizer=False)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCAB, length) for length in (1, 9, 9, 60)]
    options = {"temperature": 0.0, "max_tokens": 24}
    jobs = [job(str(i), prompt, run_id, **options) for i, prompt in enumerate(prompts)]
    found = answers(worker.sample_slice, *jobs)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    bare = [generated(base, prompt) for prompt in prompts]
    tuned = PeftModel.from_pretrained(base, tmp_path)
    for i, prompt in enumerate(prompts):
        wanted = generated(tuned, prompt)
        assert found[str(i)].sequences[0].tokens.tolist() == wanted != bare[i]


def generated(model: Any, prompt: np.ndarray) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    # No token ends the sample: the model's end token is an ordinary one here.
    whole = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return whole[0, len(prompt) :].tolist()
