"""Stored features on several ranks: written by one, read by any."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.models import Algorithm, DraftConfig, LoraConfig
from trainhouse.schemas.training import FeaturePlace, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.parallel.spec import SINGLE, ParallelSpec
from trainhouse.workers.verbs import Failure, RunSpec, Step

from .case import Case
from .test_drafts import SHAPES, guessed
from .training import ADAM, Layout, close, layout

LENGTHS = (9, 30, 4, 17, 11, 11)
# Ranks with data of their own, and such as share out tokens.
APART = [Case("fsdp=2"), pytest.param(Case("replicas=2"), marks=pytest.mark.full)]
CASES = [
    *APART,
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *(Case(spec) for spec in ("tp=2", "sp=2", "fsdp=2,sp=2")),
            Case("fsdp=2", draft="tp=2"),
            Case("fsdp=2,tp=2", draft="sp=2,tp=2"),
        )
    ),
]


def created(where: Layout, algorithm: Algorithm) -> None:
    where.call("create_run", RunSpec("draft", DraftConfig(algorithm=algorithm, seed=1, **SHAPES[algorithm]), "draft"))


def referring(where: Layout, request: ForwardBackwardRequest, directory: Path) -> ForwardBackwardRequest:
    """The same of captured features."""
    directory.mkdir(exist_ok=True)
    place = FeaturePlace(str(directory), captures=True)
    (output,) = where.run_pass(
        replace(request, loss_fn="capture", loss_fn_config={}, forward_only=True, features=place)
    )
    assert isinstance(output, ForwardBackwardOutput), output
    return with_addresses(request, output, directory)


def with_addresses(
    request: ForwardBackwardRequest, output: ForwardBackwardOutput, directory: Path
) -> ForwardBackwardRequest:
    addresses = [each["features"].tobytes().decode().split()[0] for each in output.loss_fn_outputs]
    data = [
        replace(datum, feature_ref=f"features-{address}-0")
        for datum, address in zip(request.data, addresses, strict=True)
    ]
    return replace(request, data=tuple(data), features=FeaturePlace(str(directory)))


def learned(where: Layout, request: ForwardBackwardRequest) -> list[float]:
    """What a pass tells, and the norm of its gradient; a step of no length leaves the draft as it is."""
    (output,) = where.run_pass(request)
    assert isinstance(output, ForwardBackwardOutput), output
    step = Step("draft", ADAM.model_copy(update={"learning_rate": 0.0}), "mean")
    (stepped,) = where.call("apply_steps", (step,))
    assert isinstance(stepped, dict), stepped
    losses = np.concatenate([each["losses"] for each in output.loss_fn_outputs]).tolist()
    return [*losses, output.metrics["loss:sum"], stepped["grad_norm"]]


def num_exchanged(where: Layout, request: ForwardBackwardRequest) -> int:
    before = sum(where.call("num_exchanges").values())
    learned(where, request)
    return sum(where.call("num_exchanges").values()) - before


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_of_any_rank_are_those_of_all(
    case: Case, algorithm: Algorithm, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, online = case.model(tiny_models, tmp_path), guessed(algorithm, 1, *LENGTHS)
    with layout(model, SINGLE, tmp_path) as alone, layout(model, case.parallel, tmp_path, **case.knobs) as many:
        for where in (alone, many):
            created(where, algorithm)
        offline = referring(many, online, tmp_path / "features")
        wanted = learned(many, online)
        assert learned(many, offline) == wanted, "bit for bit"
        assert close(wanted, learned(alone, offline)), "of another layout"
        # In these the data are with other ranks than when they were captured, or some refer to nothing.
        for numbers in ([5, 0, 3], [1], [4, 2, 1, 0, 3, 5]):
            for is_stored in (lambda number: True, lambda number: number % 2 == 0, lambda number: number == 1):
                data = tuple((offline if is_stored(number) else online).data[number] for number in numbers)
                found = learned(many, replace(offline, data=data))
                assert close(found, learned(many, replace(online, data=data)))
        assert not close(wanted, [1.001 * each for each in wanted])
        if case.spec == "fsdp=2":
            assert num_exchanged(many, offline) == num_exchanged(many, online) - 2, "the two layers are not gathered"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_capture_and_a_forward_share_a_pass(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model, request = case.model(tiny_models, tmp_path), replace(guessed("eagle3", 1, *LENGTHS), forward_only=True)
    (tmp_path / "features").mkdir()
    place = FeaturePlace(str(tmp_path / "features"), captures=True)
    capture = replace(request, seq_id=2, loss_fn="capture", loss_fn_config={}, features=place)
    with layout(model, case.parallel, tmp_path, **case.knobs) as where:
        created(where, "eagle3")
        (alone,) = where.run_pass(request)
        found, captured = where.run_pass(request, capture)
        assert isinstance(alone, ForwardBackwardOutput) and isinstance(captured, ForwardBackwardOutput)
        assert isinstance(found, ForwardBackwardOutput) and close(
            [found.metrics["loss:sum"]], [alone.metrics["loss:sum"]]
        )
        assert len(list((tmp_path / "features").iterdir())) == len(captured.loss_fn_outputs) == len(LENGTHS)


@pytest.mark.parametrize("case", APART, ids=str)
def test_what_a_policys_ranks_put_aside_their_draft_learns_from(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, online = case.model(tiny_models, tmp_path), guessed("eagle3", 1, *LENGTHS)
    with layout(model, case.parallel, tmp_path, **case.knobs) as where:
        created(where, "eagle3")
        where.call("create_run", RunSpec("policy", LoraConfig(rank=4, seed=11)))
        inputs = [{"target_tokens": np.roll(datum.tokens, -1), **datum.loss_fn_inputs} for datum in online.data]
        data = tuple(replace(datum, loss_fn_inputs=each) for datum, each in zip(online.data, inputs, strict=True))
        asked = ForwardBackwardRequest("policy", 1, data, "cross_entropy")
        for _ in range(2):  # its weights are no longer the base model's
            where.run_pass(asked)
            where.call("apply_steps", (Step("policy", ADAM),))
        where.call("set_target", "draft", str(where.saved("policy")))
        (tmp_path / "features").mkdir()
        place = FeaturePlace(str(tmp_path / "features"), algorithm="eagle3", layers=(0, 1))
        (output,) = where.run_pass(replace(asked, features=place))
        assert isinstance(output, ForwardBackwardOutput), output
        offline = with_addresses(online, output, tmp_path / "features")
        wanted, found = learned(where, online), learned(where, offline)
        assert close(found, wanted) and not close(found, [1.001 * each for each in wanted])
        (failure,) = where.run_pass(with_addresses(guessed("eagle3", 2, *LENGTHS), output, tmp_path / "features"))
        assert isinstance(failure, Failure) and "of other tokens" in failure.message


def test_ranks_that_share_out_tokens_put_nothing_aside(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec.parse("tp=2"), tmp_path) as where:
        where.call("create_run", RunSpec("policy", LoraConfig(rank=4, seed=11)))
        data = tuple(replace(each, loss_fn_inputs={}) for each in guessed("eagle3", 1, 9).data)
        inputs = {"target_tokens": data[0].tokens, "weights": np.ones(9, np.float32)}
        place = FeaturePlace(str(tmp_path), algorithm="eagle3", layers=(0, 1))
        asked = (replace(data[0], loss_fn_inputs=inputs),)
        (failure,) = where.run_pass(ForwardBackwardRequest("policy", 1, asked, "cross_entropy", features=place))
        assert isinstance(failure, Failure)
        assert failure.message == (
            "ranks that run tp=2 capture nothing beside a pass: leave out capture_for, and capture with the draft"
        )
