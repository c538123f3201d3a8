"""Under every layout a model trains and samples as on one rank. With `pytest -s` it prints how nearly."""

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

from .case import Case
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
from .watched_worker import WATCHED

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
CASES = [*CORE, *REPLICATED, *(pytest.param(case, marks=pytest.mark.full) for case in (*MORE, *OF_FAMILIES))]


@dataclass
class Row:
    """Of the table: how far a layout is from one rank, relative to the largest number, and what it exchanges."""

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
    """One rank, and what it told."""
    with layout(model, SINGLE, tmp_path_factory.mktemp("alone"), WATCHED) as where:
        yield where, train(where)


@pytest.fixture(scope="module")
def many(case: Case, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Numbers]]:
    with layout(model, case.parallel, tmp_path_factory.mktemp("many"), WATCHED, **case.knobs) as where:
        yield where, train(where)


def test_losses_gradients_and_weights_are_those_of_one_rank(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers], row: Row
) -> None:
    (_, theirs), (_, ours) = alone, many
    row.loss = max(error(ours.losses, theirs.losses), error(ours.norms, theirs.norms))
    row.gradient = largest_error(ours.gradients, theirs.gradients)
    row.state = largest_error(ours.weights, theirs.weights)
    row.logprob = distance(ours.logprobs, theirs.logprobs)
    assert max(row.loss, row.gradient, row.state, row.logprob) <= TOLERANCE
    assert not close(ours.losses, [1.001 * loss for loss in theirs.losses])
    assert distance(ours.logprobs, [1.001 * logprobs for logprobs in theirs.logprobs]) > TOLERANCE


def test_at_learning_rate_0_everything_repeats_bit_for_bit(
    alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    for where, _ in (alone, many):
        where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
        first, second, third, fourth, fifth = (told_before_a_step(where, rate) for rate in (1e-2, 0.0, 0.0, 1e-2, 0.0))
        where.call("drop_run", "new")
        assert second == third == fourth
        assert first[0] != second[0] and fourth[0] != fifth[0]


def told_before_a_step(where: Layout, learning_rate: float) -> list[bytes]:
    """By a pass over the same batch each time: the loss, then log-probabilities and the gradient's norm."""
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
            (metrics,) = where.call("apply_steps", (OptimizerStep("b", ADAM),))
            norms.append(metrics["unclipped_grad_l2:mean"])
    assert close(norms[1::2], norms[::2])


PROMPTS = (5, 23, 40)


def test_samples_are_those_of_one_rank(alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers], row: Row) -> None:
    directory = alone[0].saved("a")
    theirs, ours = (samples(where, directory) for where, _ in (alone, many))
    row.greedy = "same" if tokens_of(ours) == tokens_of(theirs) else "other"
    assert row.greedy == "same", (tokens_of(ours), tokens_of(theirs))
    assert distance(logprobs_of(ours), logprobs_of(theirs)) <= TOLERANCE
    # Were the adapter left out, that would show.
    of_base, of_adapter = ours[: len(PROMPTS)], ours[len(PROMPTS) :]
    assert tokens_of(of_base) != tokens_of(of_adapter)
    for base, adapted in zip(logprobs_of(of_base), logprobs_of(of_adapter), strict=True):
        num = min(len(base), len(adapted))
        assert distance([base[:num]], [adapted[:num]]) > TOLERANCE


def samples(where: Layout, directory: Path) -> list[SampleResponse]:
    """Of the base for each prompt, then of the adapter that lies there."""
    where.call("load_adapter", "s", str(directory))
    jobs = [greedy(f"{adapter_id}-{length}", adapter_id, length) for adapter_id in (None, "s") for length in PROMPTS]
    answers = where.sample(*jobs)
    told = [answer for job in jobs if isinstance(answer := answers[job.job_id], SampleResponse)]
    assert len(told) == len(jobs), answers
    return told


def tokens_of(answers: list[SampleResponse]) -> list[list[int]]:
    return [list(answer.sequences[0].tokens) for answer in answers]


def logprobs_of(answers: list[SampleResponse]) -> list[Sequence[float]]:
    """Of each sample, and of its prompt but for the first token."""
    return [each for answer in answers for each in (answer.sequences[0].logprobs, answer.prompt_logprobs[1:])]


@dataclass
class Stepped:
    """By one step of a new run: the norm of its gradient before it is clipped, its weights and what they give."""

    norm: float
    weights: dict[str, np.ndarray]
    logprobs: list[np.ndarray]


@pytest.mark.parametrize("rule", ["sum", "mean", "own"])
def test_gradients_that_are_averaged_or_not_exchanged_would_be_found(
    rule: str, alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    theirs, ours = one_step(alone[0], "sum"), one_step(many[0], rule)
    errors = {
        "norm": error([ours.norm], [theirs.norm]),
        "weights": largest_error([ours.weights], [theirs.weights]),
        "logprobs": distance(ours.logprobs, theirs.logprobs),
    }
    assert {name: found > TOLERANCE for name, found in errors.items()} == dict.fromkeys(errors, rule != "sum"), errors


def one_step(where: Layout, rule: str) -> Stepped:
    where.call("follow", rule)
    where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
    where.run_pass(supervised("new", 1, 9, 30, 17, 4, 12))
    # So small that it is not clipped: clipped, the mean may do what the sum does.
    (metrics,) = where.call("apply_steps", (OptimizerStep("new", ADAM, 0.001),))
    assert not metrics["grad_clipped:mean"], metrics
    (output,) = where.run_pass(supervised("new", 1, 9, 30, 17, 4, 12, forward_only=True))
    assert isinstance(output, ForwardBackwardOutput)
    weights = load_file(where.saved("new") / "adapter_model.safetensors")
    where.call("drop_run", "new")
    where.call("follow", "sum")
    return Stepped(metrics["unclipped_grad_l2:mean"], weights, [each["logprobs"] for each in output.loss_fn_outputs])


BATCHES = ((1,), (3,), (40,), (2, 1), (1, 1, 1), (60, 1, 1, 1, 1), (7, 30, 2, 19, 5, 11, 3, 24, 1))


@pytest.mark.parametrize("most_tokens", [16, 4096])
def test_batches_of_any_size_come_back_in_their_order_from_as_many_micro_batches_on_every_rank(
    most_tokens: int, alone: tuple[Layout, Numbers], many: tuple[Layout, Numbers]
) -> None:
    """A single datum on four ranks among them."""
    for where, _ in (alone, many):
        where.call("create_run", RunSpec("new", LoraConfig(rank=4, seed=3)))
        where.call("cut_micro_batches", most_tokens)
        where.call("num_micro_batches")
    for lengths in BATCHES:
        for forward_only in (True, False):
            request = supervised("new", sum(lengths), *lengths, forward_only=forward_only)
            (theirs,), (ours,) = alone[0].run_pass(request), many[0].run_pass(request)
            assert isinstance(ours, ForwardBackwardOutput) and isinstance(theirs, ForwardBackwardOutput)
            rows = [each["logprobs"] for each in theirs.loss_fn_outputs]
            assert [len(row) for row in rows] == list(lengths)
            assert distance([each["logprobs"] for each in ours.loss_fn_outputs], rows) <= TOLERANCE
            assert close([ours.metrics["loss:sum"]], [theirs.metrics["loss:sum"]])
            # Rows that change places, and one that is counted twice, would be found.
            alike = [pair for pair in combinations(rows, 2) if len(pair[0]) == len(pair[1])]
            assert all(distance([one], [other]) > TOLERANCE for one, other in alike)
            losses = [loss_of(datum, row) for datum, row in zip(request.data, rows, strict=True)]
            assert close([sum(losses)], [theirs.metrics["loss:sum"]])
            assert not any(close([sum(losses) + loss], [sum(losses)]) for loss in losses)
            numbers = many[0].answers("num_micro_batches")
            if many[0].spec.num_ranks > many[0].spec.replicas:  # replicas exchange nothing meanwhile
                assert len(set(numbers)) == 1 and numbers[0] > 0, (lengths, numbers)
    for where, _ in (alone, many):
        where.call("cut_micro_batches", 4096)
        where.call("drop_run", "new")


def loss_of(datum: Datum, logprobs: np.ndarray) -> float:
    return -float(datum.loss_fn_inputs["weights"] @ logprobs)


def test_exchanges_are_those_that_the_layout_needs_and_gradients_are_added_up_once_a_step(
    case: Case, many: tuple[Layout, Numbers], row: Row
) -> None:
    """Of one micro-batch: were a layer run past its exchanges, or gradients added up at each pass, this would show."""
    where, _ = many
    before = Counter(where.call("num_collectives"))
    for seed in (1, 2):
        where.run_pass(supervised("a", seed, 8, 8, 8, 8))
    passed = Counter(where.call("num_collectives"))
    where.call("apply_steps", (OptimizerStep("a", ADAM),))
    of_passes, of_step = passed - before, Counter(where.call("num_collectives")) - passed
    wanted = of_pass(case, where)
    row.exchanges = f"{of_passes.total() + of_step.total()}/{2 * wanted.total() + of_a_step(case).total()}"
    assert of_passes == wanted + wanted
    assert of_step == of_a_step(case)


def of_pass(case: Case, where: Layout) -> Counter[str]:
    """Exchanges of a micro-batch, forward and backward."""
    layers, spec = 2, where.spec
    wanted: Counter[str] = Counter()
    for unit in (unit for units in case.units for unit in units):
        if spec.ep_size_of(unit) > 1:
            # How many tokens come; they, and what comes of them; and the tokens once more for adapters of the experts.
            wanted["all_to_all"] += 1 + 2 * 2 + 1
        if spec.tp > 1 and where.shards_activations:
            wanted["all_gather"] += 2
        if spec.tp_size_of(unit) > 1:
            wanted["reduce_scatter" if where.shards_activations else "all_reduce"] += 2
    if spec.fsdp > 1:
        # Before each layer, forward and backward, but for the last one, which stays; or all of them stay. And the head.
        wanted["all_gather"] += (layers if case.zero_stage == "2" else 2 * layers - 1) + 1
        # How many tokens each rank looks up where; they, and their rows.
        wanted["all_to_all"] += 1 + 2
    if case.split.ulysses > 1:
        wanted["all_to_all"] += 2 * 4 * layers  # query, key, value and what comes of them
    if (ring := case.split.ring) > 1:
        wanted["pass_on"] += (2 * (ring - 1) + ring) * layers  # keys and values, forth and back, with their gradients
    if spec.tp > 1 and not where.shards_activations:
        wanted["all_gather"] += 1  # the gradient of the head's rows
    if spec.tp_size_of("self_attn") > 1 and case.kind == "olmo2":
        wanted["all_reduce"] += 2 * layers  # the means of norms of all heads together
    if spec.sp * spec.tp > 1:
        wanted["all_gather"] += 1  # the log-probabilities
    return wanted


def of_a_step(case: Case) -> Counter[str]:
    # Matrices that all ranks have alike, that tp shares out, that ep does, and both: of each, parts along ep and tp.
    spec = case.parallel
    parts = {(1, 1)}
    for unit in (unit for units in case.units for unit in units):
        parts |= {(spec.ep_size_of(unit), 1), (spec.ep_size_of(unit), spec.tp_size_of(unit))}
    of_regions = sum(prod(each) < spec.num_ranks for each in parts)  # what every rank has for itself needs none
    of_norms = len(parts) - 1
    return Counter(all_reduce=of_regions + of_norms)


def test_what_fails_on_one_rank_fails_on_all_and_nothing_else_does(many: tuple[Layout, Numbers]) -> None:
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


def test_what_cannot_be_written_is_told_and_nothing_else_is_lost(many: tuple[Layout, Numbers], tmp_path: Path) -> None:
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
def test_trouble_in_the_pass_of_one_rank_is_trouble_of_all_and_nobody_goes_on_waiting(
    case: Case, trouble: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Where others wait for it in the midst of a layer, all end: the dispatch starts them anew."""
    spec = case.parallel
    with layout(tiny_models[case.kind], spec, tmp_path, WATCHED) as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        where.run_pass(supervised("a", 1, 9, 30))
        ranks = [psutil.Process(pid) for pid in where.ranks.pids]
        where.call("fail", spec.num_ranks - 1, trouble)
        if spec.num_ranks > spec.replicas:
            with pytest.raises(WorkerDied, match="run_pass failed on one of its ranks, the others waited for it"):
                where.run_pass(supervised("a", 2, 9, 30))
            _, alive = psutil.wait_procs(ranks, 10)
            assert not alive
            return
        (failed,) = where.run_pass(supervised("a", 2, 9, 30))
        assert isinstance(failed, Failure)
        assert ("broken" if trouble == "raised" else "out of memory") in failed.message
        where.call("fail", spec.num_ranks - 1, "")
        (refused,) = where.call("apply_steps", (OptimizerStep("a", ADAM),))
        assert isinstance(refused, Failure) and "was refused" in refused.message
        (fine,) = where.run_pass(supervised("a", 3, 9, 30))
        assert isinstance(fine, ForwardBackwardOutput)
