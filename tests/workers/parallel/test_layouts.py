"""Every layout trains and samples as one rank does. `pytest -s` prints the differences."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import Datum, ForwardBackwardOutput
from trainhouse.workers.pools.base import WorkerDied, WorkerError
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE

from ...drawn import Drawn, as_drawn
from .case import Case
from .exchanges import Exchanges
from .faults import MicroBatches, combine_gradients
from .training import (
    ADAM,
    Layout,
    Numbers,
    close,
    distance,
    error,
    greedy,
    largest_error,
    layout,
    next_losses,
    supervised,
    train,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


CORE = (Case("replicas=2"), Case("tp=2"), Case("sp=2"), Case("fsdp=2"), Case("ep=2", "qwen3_moe"))
MORE = (
    Case("sp=2", heads="6x3"),
    Case("tp=2", tp_activations="whole"),
    *map(
        Case,
        (
            "replicas=4",
            "fsdp=4",
            "sp=2,tp=2",
            "replicas=2,tp=2",
            "fsdp=2,tp=2",
            "replicas=2,fsdp=2",
            "fsdp=2,sp=2",
            "fsdp=2,sp=2,tp=2",
            "sp=4",
        ),
    ),
    *(Case(spec, zero_stage="2") for spec in ("fsdp=2", "replicas=2,fsdp=2")),
    *(Case("tp=2", kind) for kind in ("llama", "qwen2", "qwen3_tied", "qwen3_moe")),
    *(Case("fsdp=2", kind) for kind in ("qwen3_tied", "qwen3_moe")),
    *(Case("sp=4", heads=heads) for heads in ("6x3", "6x2")),
    *(Case("sp=2,tp=2", heads="6x2"), Case("ep=2,sp=2", "qwen3_moe", heads="6x3")),
    *(Case(spec, "qwen3_moe") for spec in ("fsdp=2,ep=2", "ep=2,tp=2", "ep=2,sp=2", "ep=4")),
    *(Case(spec, "qwen3_moe_mixed") for spec in ("ep=2", "tp=2")),
)
REPLICATED = (
    Case("tp=2", replicated=("self_attn",)),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            Case("tp=2", tp_activations="whole", replicated=("self_attn",)),
            Case("tp=2", replicated=("mlp",)),
            Case("tp=2", tp_activations="whole", replicated=("mlp",)),
            Case("fsdp=2,tp=2", replicated=("self_attn",)),
            Case("sp=2,tp=2", heads="6x3", replicated=("self_attn",)),
            Case("tp=2", "phi3", replicated=("self_attn",)),
            Case("tp=2", "olmo2", replicated=("self_attn",)),
            Case("tp=2", "qwen3_moe", replicated=("experts",)),
            Case("tp=2", "qwen3_moe_mixed", "whole", replicated=("mlp",)),
            Case("ep=2", "qwen3_moe", replicated=("experts",)),
            Case("ep=2,tp=2", "qwen3_moe", replicated=("self_attn",)),
            Case("ep=2,tp=2", "qwen3_moe", replicated=("experts",)),
        )
    ),
)
FAMILIES = (
    *(
        Case(spec, kind)
        for kind in ("phi3", "mistral")
        for spec in ("replicas=2", "tp=2", "sp=2", "fsdp=2", "replicas=2,fsdp=2", "fsdp=2,tp=2", "sp=2,tp=2")
    ),
    Case("tp=2", "phi3", "whole"),
    *(
        Case(spec, kind)
        for kind in ("olmo2", "gemma2", "gemma3", "cohere")
        for spec in ("tp=2", "fsdp=2,tp=2", "sp=2,tp=2")
    ),
    Case("tp=2", "olmo2", "whole"),
    *(Case(spec, kind) for kind in ("mixtral", "qwen3_moe_mixed") for spec in ("tp=2", "fsdp=2,ep=2", "ep=2,tp=2")),
)
CASES = [*CORE, *REPLICATED, *(pytest.param(case, marks=pytest.mark.full) for case in (*MORE, *FAMILIES))]


@dataclass
class Row:
    """A row of the printed table: relative errors of a layout against one rank, and its exchanges."""

    case: Case
    loss: float | None = None
    gradient: float | None = None
    state: float | None = None
    logprob: float | None = None
    greedy: str = ""
    exchanges: str = ""

    def __str__(self) -> str:
        errors = (self.loss, self.gradient, self.state, self.logprob)
        cells = ["" if each is None else f"{each:.1e}" for each in errors]
        return " | ".join([f"{self.case!s:30}", *(f"{cell:8}" for cell in cells), f"{self.greedy:6}", self.exchanges])


HEADER = "layout                         | loss     | gradient | state    | logprob  | greedy | exchanged/predicted"


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    print("", HEADER, *rows, sep="\n")


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def row(case: Case, table: list[Row]) -> Row:
    table.append(Row(case))
    return table[-1]


@pytest.fixture(scope="module")
def model(case: Case, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.model(tiny_models, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Numbers]]:
    """One rank, and its training results."""
    with layout(model, SINGLE, tmp_path_factory.mktemp("alone")) as where:
        yield where, train(where)


@pytest.fixture(scope="module")
def many(case: Case, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Numbers]]:
    with layout(model, case.parallel, tmp_path_factory.mktemp("many"), **case.options) as where:
        yield where, train(where)


def test_training_equals_one_rank(alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers], row: Row) -> None:
    (_, theirs), (_, ours) = alone, many
    assert ours.flops == theirs.flops
    row.loss = max(error(ours.losses, theirs.losses), error(ours.norms, theirs.norms))
    row.gradient = largest_error(ours.gradients, theirs.gradients)
    row.state = largest_error(ours.weights, theirs.weights)
    row.logprob = distance(ours.logprobs, theirs.logprobs)
    assert max(row.loss, row.gradient, row.state, row.logprob) <= TOLERANCE
    assert not close(ours.losses, [1.001 * loss for loss in theirs.losses])
    assert distance(ours.logprobs, [1.001 * logprobs for logprobs in theirs.logprobs]) > TOLERANCE


def test_learning_rate_0_repeats_bit_for_bit(alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]) -> None:
    for where, _ in (alone, many):
        where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
        first, second, third, fourth, fifth = (
            results_before_a_step(where, rate) for rate in (1e-2, 0.0, 0.0, 1e-2, 0.0)
        )
        where.call("drop_run", "new")
        assert second == third == fourth
        assert first[0] != second[0] and fourth[0] != fifth[0]


def results_before_a_step(where: Layout, learning_rate: float) -> list[bytes]:
    """Makes a pass over the same batch, then a step; returns the loss, log-probabilities and gradient norm."""
    (output,) = where.run_pass(supervised("new", 1, 9, 30, 17, 4, 12))
    assert isinstance(output, ForwardBackwardOutput)
    (metrics,) = where.call(
        "apply_steps", (OptimizerStep("new", ADAM.model_copy(update={"learning_rate": learning_rate})),)
    )
    logprobs = [each["logprobs"] for each in output.loss_fn_outputs]
    return [
        np.asarray(each).tobytes()
        for each in (output.metrics["loss:sum"], *logprobs, metrics["unclipped_grad_l2:mean"])
    ]


def test_checkpoints_resume_under_the_layout_and_on_one_rank(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    for saving in (alone[0], many[0]):
        directory = saving.saved("a")
        uninterrupted = next_losses(saving)
        for loading in (alone[0], many[0]):
            loading.call("load_run", "a", str(directory), True)
            assert close(next_losses(loading), uninterrupted)
        assert not close(next_losses(saving), uninterrupted)


def test_snapshot_gradients_resume_under_the_layout_and_on_one_rank(
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
            (metrics,) = where.call("apply_steps", (OptimizerStep("b", ADAM),))
            norms.append(metrics["unclipped_grad_l2:mean"])
    assert close(norms[1::2], norms[::2])


PROMPTS = (5, 23, 40)


def test_samples_equal_one_rank(alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers], row: Row) -> None:
    directory = alone[0].saved("a")
    theirs, ours = (samples(where, directory) for where, _ in (alone, many))
    row.greedy = "same" if tokens_of(ours) == tokens_of(theirs) else "other"
    assert row.greedy == "same", (tokens_of(ours), tokens_of(theirs))
    same = [one.num_shared(other) for one, other in zip(tokens_of(ours), tokens_of(theirs), strict=True)]
    assert distance(logprobs_of(ours, same), logprobs_of(theirs, same)) <= TOLERANCE
    # Leaving out the adapter would show.
    base_samples, adapter_samples = ours[: len(PROMPTS)], ours[len(PROMPTS) :]
    assert tokens_of(base_samples) != tokens_of(adapter_samples)
    for base, adapted in zip(logprobs_of(base_samples), logprobs_of(adapter_samples), strict=True):
        num = min(len(base), len(adapted))
        assert distance([base[:num]], [adapted[:num]]) > TOLERANCE


def samples(where: Layout, directory: Path) -> list[SampleResponse]:
    """Samples the base for each prompt, then the adapter saved in `directory`."""
    where.call("load_adapter", "s", str(directory))
    jobs = [greedy(f"{adapter_id}-{length}", adapter_id, length) for adapter_id in (None, "s") for length in PROMPTS]
    answers = where.sample(*jobs)
    found = [answer for job in jobs if isinstance(answer := answers[job.job_id], SampleResponse)]
    assert len(found) == len(jobs), answers
    return found


def tokens_of(answers: list[SampleResponse]) -> list[Drawn]:
    return [as_drawn(answer.sequences[0]) for answer in answers]


def logprobs_of(answers: list[SampleResponse], ends: Sequence[int | None] | None = None) -> list[Sequence[float]]:
    """Returns, for each sample, its log-probabilities up to its end and those of its prompt without the first token."""
    ended = zip(answers, ends or [None] * len(answers), strict=True)
    return [each for one, end in ended for each in (one.sequences[0].logprobs[:end], one.prompt_logprobs[1:])]


@dataclass
class StepResult:
    """Results of one step of a new run: the gradient norm before clipping, the weights and their log-probabilities."""

    norm: float
    weights: dict[str, np.ndarray]
    logprobs: list[np.ndarray]


@pytest.mark.parametrize("rule", ["sum", "mean", "own"])
def test_averaged_or_unexchanged_gradients_would_show(
    rule: str, alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    theirs, ours = one_step(alone[0], "sum"), one_step(many[0], rule)
    errors = {
        "norm": error([ours.norm], [theirs.norm]),
        "weights": largest_error([ours.weights], [theirs.weights]),
        "logprobs": distance(ours.logprobs, theirs.logprobs),
    }
    assert {name: found > TOLERANCE for name, found in errors.items()} == dict.fromkeys(errors, rule != "sum"), errors


def one_step(where: Layout, rule: str) -> StepResult:
    where.probe(combine_gradients, rule)
    where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
    where.run_pass(supervised("new", 1, 9, 30, 17, 4, 12))
    # Scaled down to avoid clipping, which would make the mean equal the sum.
    (metrics,) = where.call("apply_steps", (OptimizerStep("new", ADAM, 0.001),))
    assert not metrics["grad_clipped:mean"], metrics
    (output,) = where.run_pass(supervised("new", 1, 9, 30, 17, 4, 12, forward_only=True))
    assert isinstance(output, ForwardBackwardOutput)
    weights = load_file(where.saved("new") / "adapter_model.safetensors")
    where.call("drop_run", "new")
    where.probe(combine_gradients, "sum")
    return StepResult(metrics["unclipped_grad_l2:mean"], weights, [each["logprobs"] for each in output.loss_fn_outputs])


BATCHES = ((1,), (3,), (40,), (2, 1), (1, 1, 1), (60, 1, 1, 1, 1), (7, 30, 2, 19, 5, 11, 3, 24, 1))


@pytest.mark.parametrize("most_tokens", [16, 4096])
def test_batches_of_any_size_keep_order_and_use_equal_micro_batch_counts(
    most_tokens: int, alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    """The batches include a single datum on four ranks."""
    for where, _ in (alone, many):
        where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
        where.call("cut_micro_batches", most_tokens)
        where.probe(MicroBatches.num)
    for lengths in BATCHES:
        for forward_only in (True, False):
            request = supervised("new", sum(lengths), *lengths, forward_only=forward_only)
            (theirs,), (ours,) = alone[0].run_pass(request), many[0].run_pass(request)
            assert isinstance(ours, ForwardBackwardOutput) and isinstance(theirs, ForwardBackwardOutput)
            rows = [each["logprobs"] for each in theirs.loss_fn_outputs]
            assert [len(row) for row in rows] == list(lengths)
            assert distance([each["logprobs"] for each in ours.loss_fn_outputs], rows) <= TOLERANCE
            assert close([ours.metrics["loss:sum"]], [theirs.metrics["loss:sum"]])
            # Swapped rows, or one counted twice, would show.
            alike = [pair for pair in combinations(rows, 2) if len(pair[0]) == len(pair[1])]
            assert all(distance([one], [other]) > TOLERANCE for one, other in alike)
            losses = [loss_of(datum, row) for datum, row in zip(request.data, rows, strict=True)]
            assert close([sum(losses)], [theirs.metrics["loss:sum"]])
            assert not any(close([sum(losses) + loss], [sum(losses)]) for loss in losses)
            numbers = many[0].probe(MicroBatches.num)
            if many[0].spec.num_ranks > many[0].spec.replicas:  # replicas exchange nothing meanwhile
                assert len(set(numbers)) == 1 and numbers[0] > 0, (lengths, numbers)
    for where, _ in (alone, many):
        where.call("cut_micro_batches", 4096)
        where.call("drop_run", "new")


def loss_of(datum: Datum, logprobs: np.ndarray) -> float:
    return -float(datum.loss_fn_inputs["weights"] @ logprobs)


def test_exchanges_are_as_expected_and_gradients_are_reduced_once_per_step(
    case: Case, many: tuple[Layout, Numbers], row: Row
) -> None:
    """Running a layer without its exchanges, or reducing gradients at each pass, would show."""
    where, _ = many
    before = where.probe(Exchanges.num)[0]
    for seed in (1, 2):
        where.run_pass(supervised("a", seed, 8, 8, 8, 8))
    passed = where.probe(Exchanges.num)[0]
    where.call("apply_steps", (OptimizerStep("a", ADAM),))
    pass_exchanges, step_exchanges = passed - before, where.probe(Exchanges.num)[0] - passed
    wanted = expected_in_pass(case, where)
    row.exchanges = (
        f"{pass_exchanges.total() + step_exchanges.total()}/{2 * wanted.total() + expected_in_step(case).total()}"
    )
    assert pass_exchanges == wanted + wanted
    assert step_exchanges == expected_in_step(case)


def expected_in_pass(case: Case, where: Layout) -> Counter[str]:
    """Returns the exchanges of a micro-batch, forward and backward."""
    layers, spec = 2, where.spec
    wanted: Counter[str] = Counter()
    for unit in (unit for units in case.units for unit in units):
        if spec.ep_size_of(unit) > 1:
            # Token counts; the tokens and their outputs; and the tokens again for adapters of the experts.
            wanted["all_to_all"] += 1 + 2 * 2 + 1
        if spec.tp > 1 and where.shards_activations:
            wanted["all_gather"] += 2
        if spec.tp_size_of(unit) > 1:
            wanted["reduce_scatter" if where.shards_activations else "all_reduce"] += 2
    if spec.fsdp > 1:
        # Each layer, forward and backward, except the last one, which stays (ZeRO-2: all stay). And the head.
        wanted["all_gather"] += (layers if case.zero_stage == "2" else 2 * layers - 1) + 1
        # Token counts of embedding lookups; the tokens, and their rows.
        wanted["all_to_all"] += 1 + 2
    if case.split.ulysses > 1:
        wanted["all_to_all"] += 2 * 4 * layers  # query, key, value and the output
    if (ring := case.split.ring) > 1:
        # Keys and values, forth and back, with their gradients.
        wanted["ring_shift"] += (2 * (ring - 1) + ring) * layers
    if spec.tp > 1 and not where.shards_activations:
        wanted["all_gather"] += 1  # the gradient of the head's rows
    if spec.tp_size_of("self_attn") > 1 and case.kind == "olmo2":
        wanted["all_reduce"] += 2 * layers  # the means of norms of all heads together
    if spec.sp * spec.tp > 1:
        wanted["all_gather"] += 1  # the log-probabilities
    return wanted


def expected_in_step(case: Case) -> Counter[str]:
    # Matrices by how they are split along (ep, tp): replicated, as those that experts share, by tp, by ep, and by both.
    spec = case.parallel
    parts = {(1, 1), *((spec.ep_size_of(unit), spec.tp_size_of(unit)) for units in case.units for unit in units)}
    num_regions = sum(prod(each) < spec.num_ranks for each in parts)  # matrices split over all ranks need no exchange
    num_norms = len(parts) - 1
    return Counter(all_reduce=num_regions + num_norms)


def test_bad_operation_fails_on_all_ranks_and_others_succeed(many: tuple[Layout, Numbers]) -> None:
    where, _ = many
    bad = supervised("a", 1, 9, 8)
    bad.data[1].loss_fn_inputs["target_tokens"][3] = 10**6
    failed, fine = where.run_pass(bad, supervised("b", 1, 4, 5, 6))
    assert isinstance(failed, Failure) and "datum 1: target_tokens has token id 1000000 at position 3" in failed.message
    assert not isinstance(fine, Failure)
    refused, metrics = where.call("apply_steps", (OptimizerStep("a", ADAM), OptimizerStep("b", ADAM)))
    assert isinstance(refused, Failure) and "was refused" in refused.message
    assert metrics["window_tokens:sum"] == 15
    (empty,) = where.run_pass(supervised("a", 1))
    assert isinstance(empty, Failure) and "the batch is empty" in empty.message
    where.call("clear_gradients", "a")


def test_failed_save_is_reported_and_loses_nothing(many: tuple[Layout, Numbers], tmp_path: Path) -> None:
    where, _ = many
    with pytest.raises(WorkerError, match="is_missing"):
        where.call("save_run", "a", str(tmp_path / "is_missing"), True)
    where.saved("a")


TROUBLE = (
    *((Case("replicas=2"), "raised"), (Case("fsdp=2"), "out of memory")),
    *(
        pytest.param(Case(spec, "qwen3_moe"), trouble, marks=pytest.mark.full)
        for spec in ("replicas=2", "replicas=2,fsdp=2", "tp=2", "sp=2", "ep=2")
        for trouble in ("raised", "out of memory")
    ),
)


@pytest.mark.parametrize(("case", "trouble"), TROUBLE, ids=str)
def test_error_in_a_pass_of_one_rank_fails_or_ends_all_ranks(
    case: Case, trouble: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """If other ranks wait in the middle of a layer, all ranks end, and the dispatch restarts them."""
    spec = case.parallel
    with layout(tiny_models[case.kind], spec, tmp_path) as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        where.run_pass(supervised("a", 1, 9, 30))
        ranks = [psutil.Process(pid) for pid in where.ranks.pool.pids]
        where.probe(MicroBatches.fail, spec.num_ranks - 1, trouble)
        if spec.num_ranks > spec.replicas:
            with pytest.raises(WorkerDied, match="run_pass failed on one of its ranks, the others waited for it"):
                where.run_pass(supervised("a", 2, 9, 30))
            _, alive = psutil.wait_procs(ranks, 10)
            assert not alive
            return
        (failed,) = where.run_pass(supervised("a", 2, 9, 30))
        assert isinstance(failed, Failure)
        assert ("broken" if trouble == "raised" else "out of memory") in failed.message
        where.probe(MicroBatches.fail, spec.num_ranks - 1, "")
        (refused,) = where.call("apply_steps", (OptimizerStep("a", ADAM),))
        assert isinstance(refused, Failure) and "was refused" in refused.message
        (fine,) = where.run_pass(supervised("a", 3, 9, 30))
        assert isinstance(fine, ForwardBackwardOutput)
