"""Stored features on ranks that have data of their own: written by one, read by any."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import FeaturePlace, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.parallel.spec import SINGLE
from trainhouse.workers.verbs import RunSpec, Step

from .case import Case
from .test_drafts import SHAPES, guessed
from .training import ADAM, Layout, close, layout

LENGTHS = (9, 30, 4, 17, 11, 11)
CASES = [
    Case("fsdp=2"),
    *(pytest.param(Case(spec), marks=pytest.mark.full) for spec in ("replicas=2", "tp=2", "sp=2", "fsdp=2,sp=2")),
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
