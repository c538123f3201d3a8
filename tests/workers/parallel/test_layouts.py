"""Under every layout a model trains and samples as on one rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.parallel.sequence_split import SequenceSplit
from trainhouse.workers.parallel.spec import SINGLE, ParallelSpec
from trainhouse.workers.verbs import Failure, Step

from ...tiny import tiny_model
from .training import ADAM, Layout, Numbers, greedy, layout, next_losses, supervised, train


@dataclass(frozen=True)
class Case:
    spec: str
    kind: str = "qwen3"
    tp_activations: Literal["sharded", "whole"] = "sharded"
    heads: str = "4x2"

    def __str__(self) -> str:
        whole = "-whole" if self.tp_activations == "whole" else ""
        return f"{self.spec}-{self.kind}{whole}" + (f"-{self.heads}" if self.heads in HEADS else "")

    def model(self, tiny_models: dict[str, Path], directory: Path) -> Path:
        if self.heads not in HEADS:
            return tiny_models[self.kind]
        return tiny_model(self.kind, directory / "model", **HEADS[self.heads])

    @property
    def split(self) -> SequenceSplit:
        heads, kv_heads = (int(number) for number in self.heads.split("x"))
        spec = ParallelSpec.parse(self.spec)
        return SequenceSplit.of(spec.sp, heads // spec.tp, kv_heads // spec.tp)


# Query and key/value heads that two ranks cannot share out, with one rank along tp, or with two.
HEADS: dict[str, dict[str, object]] = {
    "6x3": {"num_attention_heads": 6, "num_key_value_heads": 3}
    | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "6x2": {"num_attention_heads": 6, "num_key_value_heads": 2},
}


CORE = (
    *(Case("replicas=2"), Case("tp=2"), Case("sp=2"), Case("fsdp=2"), Case("ep=2", "qwen3_moe")),
    Case("sp=2", heads="6x3"),
)
MORE = (
    Case("tp=2", tp_activations="whole"),
    *map(Case, ("sp=2,tp=2", "replicas=2,tp=2", "fsdp=2,tp=2", "replicas=2,fsdp=2", "fsdp=2,sp=2", "sp=4")),
    *(Case("tp=2", kind) for kind in ("llama", "qwen2", "qwen3_tied", "qwen3_moe")),
    *(Case("fsdp=2", kind) for kind in ("qwen3_tied", "qwen3_moe")),
    *(Case("sp=4", heads=heads) for heads in ("6x3", "6x2")),
    *(Case("sp=2,tp=2", heads="6x2"), Case("ep=2,sp=2", "qwen3_moe", heads="6x3")),
    *(Case(spec, "qwen3_moe") for spec in ("fsdp=2,ep=2", "ep=2,tp=2", "ep=2,sp=2", "ep=4")),
    *(Case(spec, "qwen3_moe_mixed") for spec in ("ep=2", "tp=2")),
)
OF_FAMILIES = (
    *(
        Case(spec, kind)
        for kind in ("phi3", "mistral")
        for spec in ("replicas=2", "tp=2", "sp=2", "fsdp=2", "replicas=2,fsdp=2", "fsdp=2,tp=2", "sp=2,tp=2")
    ),
    Case("tp=2", "phi3", "whole"),
    *(Case(spec, kind) for kind in ("olmo2", "gemma3") for spec in ("tp=2", "fsdp=2,tp=2", "sp=2,tp=2")),
    Case("tp=2", "olmo2", "whole"),
    *(Case(spec, kind) for kind in ("mixtral", "qwen3_moe_mixed") for spec in ("tp=2", "fsdp=2,ep=2", "ep=2,tp=2")),
)
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.full) for case in (*MORE, *OF_FAMILIES))]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.model(tiny_models, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Numbers]]:
    """One rank, and what it told."""
    with layout(model, SINGLE, tmp_path_factory.mktemp("alone")) as where:
        yield where, train(where)


@pytest.fixture(scope="module")
def many(case: Case, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Numbers]]:
    spec, knobs = ParallelSpec.parse(case.spec), {"tp_activations": case.tp_activations}
    with layout(model, spec, tmp_path_factory.mktemp("many"), **knobs) as where:
        yield where, train(where)


def close(ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, tolerance: float = 1e-4) -> bool:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return bool(np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max())


def test_losses_gradients_and_weights_are_those_of_one_rank(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    (_, theirs), (_, ours) = alone, many
    assert close(ours.losses, theirs.losses) and close(ours.norms, theirs.norms)
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(one - other).max() <= 1e-4
    for of_ours, of_theirs in zip(ours.gradients + ours.weights, theirs.gradients + theirs.weights, strict=True):
        assert of_ours.keys() == of_theirs.keys()
        for name, matrix in of_ours.items():
            assert close(matrix, of_theirs[name]), name
    # What these bounds would not let pass: a gradient that is averaged instead of summed, or of one rank alone.
    name = next(name for name in ours.gradients[0] if "lora_B" in name)
    assert not close(0.5 * ours.gradients[0][name], theirs.gradients[0][name])
    assert not close(ours.losses, [1.001 * loss for loss in theirs.losses])


def test_what_one_rank_saved_goes_on_under_the_layout_and_back(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    for saving in (alone[0], many[0]):
        directory = saving.saved("a")
        uninterrupted = next_losses(saving)
        for loading in (alone[0], many[0]):
            loading.call("load_run", "a", str(directory), True)
            assert close(next_losses(loading), uninterrupted)
        assert not close(next_losses(saving), uninterrupted)


def test_gradients_of_a_snapshot_go_on_under_the_layout_and_back(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    norms = []
    for first, second in ((alone[0], many[0]), (many[0], alone[0])):
        first.call("load_run", "b", str(first.saved("b")), True)
        first.run_pass(supervised("b", 3, 9, 14, 7))
        directory = first.snapshot("b")
        for where in (second, first):
            if where is second:
                where.call("load_run", "b", str(directory), True)
            where.run_pass(supervised("b", 4, 21))
            (metrics,) = where.call("apply_steps", (Step("b", ADAM),))
            norms.append(metrics["grad_norm"])
    assert close(norms[1::2], norms[::2])


def test_samples_are_those_of_one_rank(alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]) -> None:
    directory = alone[0].saved("a")
    jobs = [
        greedy(f"{adapter_id}-{length}", adapter_id, length) for adapter_id in (None, "s") for length in (5, 23, 40)
    ]
    answers = []
    for where, _ in (alone, many):
        where.call("load_adapter", "s", str(directory))
        answers.append(where.sample(*jobs))
    for job in jobs:
        theirs, ours = (each[job.job_id] for each in answers)
        assert isinstance(theirs, SampleResponse) and isinstance(ours, SampleResponse)
        assert np.array_equal(ours.sequences[0].tokens, theirs.sequences[0].tokens)
        assert np.abs(np.subtract(ours.sequences[0].logprobs, theirs.sequences[0].logprobs)).max() <= 1e-4
        assert np.abs(np.subtract(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:])).max() <= 1e-4


def test_at_learning_rate_0_a_loss_repeats_bit_for_bit(many: tuple[Layout, Numbers]) -> None:
    where, _ = many
    losses = set()
    for _ in range(3):
        (output,) = where.run_pass(supervised("a", 1, 9, 30, 17))
        losses.add(output.metrics["loss:sum"])
        where.call("apply_steps", (Step("a", ADAM.model_copy(update={"learning_rate": 0.0})),))
    assert len(losses) == 1


def test_exchanges_are_those_that_the_layout_needs_and_gradients_are_added_up_once_a_step(
    case: Case,
    many: tuple[Layout, Numbers],
) -> None:
    """Of one micro-batch: were a layer run past its exchanges, or gradients added up at each pass, this would show."""
    where, _ = many
    layers, spec = 2, where.spec
    sparse_layers = 1 if case.kind == "qwen3_moe_mixed" else layers
    before = where.call("num_exchanges")
    for seed in (1, 2):
        where.run_pass(supervised("a", seed, 8, 8, 8, 8))
    passed = where.call("num_exchanges")
    where.call("apply_steps", (Step("a", ADAM),))
    stepped = where.call("num_exchanges")
    of_pass = {kind: (passed[kind] - before.get(kind, 0)) / 2 for kind in passed if passed[kind] > before.get(kind, 0)}
    of_step = {kind: stepped[kind] - passed.get(kind, 0) for kind in stepped if stepped[kind] > passed.get(kind, 0)}
    wanted = dict.fromkeys(("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "pass_on"), 0)
    sparse_layers = 1 if case.kind == "qwen3_moe_mixed" else layers
    if spec.ep > 1:
        # How many tokens come; they, and what comes of them; and the tokens once more for adapters of the experts.
        wanted["all_to_all"] += (1 + 2 * 2 + 1) * sparse_layers
    if spec.fsdp > 1:
        wanted["all_gather"] += 2 * layers - 1  # before each layer, forward and backward; the last one stays
    if case.split.ulysses > 1:
        wanted["all_to_all"] += 2 * 4 * layers  # query, key, value and what comes of them
    if (ring := case.split.ring) > 1:
        wanted["pass_on"] += (2 * (ring - 1) + ring) * layers  # keys and values, forth and back, with their gradients
    if spec.tp > 1 and where.shards_activations:
        wanted["all_gather"] += 2 * 2 * layers
        wanted["reduce_scatter"] += 2 * 2 * layers
    elif spec.tp > 1:
        wanted["all_reduce"] += 2 * 2 * layers
        wanted["all_gather"] += 1  # the gradient of the head's rows
    if spec.tp > 1 and case.kind == "olmo2":
        wanted["all_reduce"] += 2 * layers  # the means of norms of all heads together
    if spec.sp * spec.tp > 1:
        wanted["all_gather"] += 1  # the log-probabilities
    assert of_pass == {kind: number for kind, number in wanted.items() if number}
    # Matrices that all ranks have alike, that tp shares out, that ep does, and both: of each, how many parts.
    parts = [1]
    for axis in (spec.tp, spec.ep):
        parts += [num * axis for num in parts] if axis > 1 else []
    of_regions = sum(num < spec.num_ranks for num in parts)  # what every rank has for itself needs none
    of_norms = len(parts) - 1
    assert of_step == {"all_reduce": of_regions + of_norms}


def test_what_fails_on_one_rank_fails_on_all_and_nothing_else_does(many: tuple[Layout, Numbers]) -> None:
    where, _ = many
    bad = supervised("a", 1, 9, 8)
    bad.data[1].loss_fn_inputs["target_tokens"][3] = 10**6
    failed, fine = where.run_pass(bad, supervised("b", 1, 4, 5, 6))
    assert isinstance(failed, Failure) and "datum 1: target_tokens has token id 1000000 at position 3" in failed.message
    assert not isinstance(fine, Failure)
    refused, metrics = where.call("apply_steps", (Step("a", ADAM), Step("b", ADAM)))
    assert isinstance(refused, Failure) and "was refused" in refused.message
    assert metrics["num_tokens"] == 15
    (empty,) = where.run_pass(supervised("a", 1))
    assert isinstance(empty, Failure) and "the batch is empty" in empty.message
    where.call("clear_gradients", "a")
