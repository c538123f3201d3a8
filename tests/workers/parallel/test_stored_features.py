"""Stored features on several ranks: one rank writes them, any rank reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import Algorithm, DraftConfig, FullConfig, LoraConfig, TrainingConfig
from trainhouse.schemas.training import DraftFeatures, FeatureLocation, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.drafts.training.feature_capture import FEATURES
from trainhouse.workers.protocol.calls import DataShare, Failure, OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE

from ..requests import repeatable
from .case import Case
from .exchanges import Exchanges
from .faults import MicroBatches, miss_features
from .test_drafts import SHAPES, draft_request
from .training import ADAM, Layout, close, layout

pytestmark = pytest.mark.slow

LENGTHS = (9, 30, 4, 17, 11, 11)
# Ranks with their own data; CASES adds ranks that split tokens.
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


FORMS: dict[str, dict[str, Any]] = {
    "hidden_state": {},
    "logits": {"target_repr": "logits"},
    "vocabulary": {"target_repr": "pruned_logits", "draft_vocab_size": 200},
    "top": {"target_repr": "pruned_logits", "target_top_k": 12},
}
"""Configurations of eagle3 drafts that differ in how they read their target's distribution, by name."""
VOCABULARY = np.arange(20, 220)


def create_draft(where: Layout, algorithm: Algorithm, form: str = "hidden_state", run_id: str = "draft") -> None:
    config = DraftConfig(algorithm=algorithm, seed=1, **SHAPES[algorithm], **FORMS[form])
    where.call("create_run", RunSpec(run_id, config, "draft"))
    if config.draft_vocab_size is not None:
        where.call("set_vocabulary", run_id, VOCABULARY)


def referring(where: Layout, request: ForwardBackwardRequest, directory: Path) -> ForwardBackwardRequest:
    """Captures features of the data, and returns the request with references to them."""
    directory.mkdir(exist_ok=True)
    place = FeatureLocation(str(directory), captures=True)
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
    return replace(request, data=tuple(data), features=FeatureLocation(str(directory)))


def refs_of(request: ForwardBackwardRequest) -> list[str | None]:
    return [datum.feature_ref for datum in request.data]


def learned(where: Layout, request: ForwardBackwardRequest, run_id: str = "draft") -> list[float]:
    """Returns losses and gradient norm of a pass; a step with learning rate 0 leaves the draft unchanged."""
    (output,) = where.run_pass(request)
    assert isinstance(output, ForwardBackwardOutput), output
    step = OptimizerStep(run_id, ADAM.model_copy(update={"learning_rate": 0.0}), "mean")
    (metrics,) = where.call("apply_steps", (step,))
    assert isinstance(metrics, dict), metrics
    losses = np.concatenate([each["losses"] for each in output.loss_fn_outputs]).tolist()
    return [*losses, output.metrics["loss:sum"], metrics["unclipped_grad_l2:mean"]]


def num_exchanged(where: Layout, request: ForwardBackwardRequest) -> int:
    before = where.probe(Exchanges.num)[0].total()
    learned(where, request)
    return where.probe(Exchanges.num)[0].total() - before


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_of_any_rank_serve_all_ranks(
    case: Case, algorithm: Algorithm, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, online = case.model(tiny_models, tmp_path), draft_request(algorithm, 1, *LENGTHS)
    with (
        layout(model, SINGLE, tmp_path) as alone,
        layout(model, case.parallel, tmp_path, **case.options) as many,
    ):
        for where in (alone, many):
            create_draft(where, algorithm)
        offline = referring(many, online, tmp_path / "features")
        wanted = learned(many, online)
        assert learned(many, offline) == wanted, "bit for bit"
        assert close(wanted, learned(alone, offline)), "captured under another layout"
        # The data are on other ranks than at capture, or some have no reference.
        for numbers in ([5, 0, 3], [1], [4, 2, 1, 0, 3, 5]):
            for is_stored in (lambda number: True, lambda number: number % 2 == 0, lambda number: number == 1):
                data = tuple((offline if is_stored(number) else online).data[number] for number in numbers)
                found = learned(many, replace(offline, data=data))
                assert close(found, learned(many, replace(online, data=data)))
        assert not close(wanted, [1.001 * each for each in wanted])
        if case.spec == "fsdp=2" and case.draft is None:
            assert num_exchanged(many, offline) == num_exchanged(many, online) - 2, "the two layers are not gathered"


SHARED = [
    Case("tp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *(Case(spec) for spec in ("sp=2", "sp=2,tp=2", "fsdp=2,tp=2")),
            Case("fsdp=2,tp=2", draft="sp=2,tp=2"),
        )
    ),
]


# Beyond one rank alone: features are sent from rank to rank with the last two.
LOGIT_CASES = [
    (Case("tp=2"), "top"),
    (Case("fsdp=2", draft="tp=2"), "vocabulary"),
    *(
        pytest.param(case, form, marks=pytest.mark.full)
        for case in (Case("fsdp=2"), Case("sp=2"), Case("tp=2"), Case("fsdp=2,tp=2", draft="sp=2,tp=2"))
        for form in ("logits", "vocabulary", "top")
    ),
    *(pytest.param(Case("fsdp=2", draft="sp=2"), form, marks=pytest.mark.full) for form in ("logits", "top")),
]


@pytest.mark.parametrize(("case", "form"), LOGIT_CASES, ids=str)
def test_stored_logits_of_any_rank_serve_all_ranks(
    case: Case, form: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, online = case.model(tiny_models, tmp_path), draft_request("eagle3", 1, *LENGTHS)
    with (
        layout(model, SINGLE, tmp_path) as alone,
        layout(model, case.parallel, tmp_path, **case.options) as many,
    ):
        for where in (alone, many):
            create_draft(where, "eagle3", form)
        offline = referring(many, online, tmp_path / "features")
        wanted = learned(many, online)
        assert close(wanted, learned(alone, online)), "the target read in the same form"
        assert close(wanted, learned(many, offline)) and close(wanted, learned(alone, offline))
        # Some data have no reference, on one rank or on both.
        for is_stored in (lambda number: number % 2 == 0, lambda number: number == 1):
            data = [(offline if is_stored(number) else online).data[number] for number in range(len(LENGTHS))]
            assert close(wanted, learned(many, replace(offline, data=tuple(data))))
        assert not close(wanted, [1.001 * each for each in wanted])
        if form == "top":
            create_draft(alone, "eagle3", run_id="exact")
            exact = replace(online, model_id="exact")
            assert not close(wanted, learned(alone, exact, "exact")), "the top logits approximate"


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_features_missing_on_one_rank_are_recomputed_by_its_team(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Files may be deleted between two ranks' lookups, and machines may see different directories."""
    model, online = case.model(tiny_models, tmp_path), draft_request("eagle3", 1, *LENGTHS)
    everything, last = range(len(LENGTHS)), case.parallel.num_ranks - 1
    with layout(model, case.parallel, tmp_path, **case.options) as where:
        create_draft(where, "eagle3")
        offline = referring(where, online, tmp_path / "features")
        wanted = learned(where, offline)
        for missed in ({0: everything}, {last: everything}, {0: (1, 2), last: (0, 2)}):
            where.probe(miss_features, missed)
            where.probe(MicroBatches.num)
            assert close(learned(where, offline), wanted)
            assert where.probe(MicroBatches.num)[0] > 0, "all ranks run it"
            assert refs_of(referring(where, online, tmp_path / "features")) == refs_of(offline), "captured again"
        where.probe(miss_features, {})
        where.probe(MicroBatches.num)
        assert learned(where, offline) == wanted and where.probe(MicroBatches.num)[0] == 0
        assert not close(wanted, [1.001 * each for each in wanted])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_capture_and_forward_share_a_pass(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model, request = case.model(tiny_models, tmp_path), replace(draft_request("eagle3", 1, *LENGTHS), forward_only=True)
    (tmp_path / "features").mkdir()
    place = FeatureLocation(str(tmp_path / "features"), captures=True)
    capture = replace(request, seq_id=2, loss_fn="capture", loss_fn_config={}, features=place)
    with layout(model, case.parallel, tmp_path, **case.options) as where:
        create_draft(where, "eagle3")
        (alone,) = where.run_pass(request)
        found, captured = where.run_pass(request, capture)
        assert isinstance(alone, ForwardBackwardOutput) and isinstance(captured, ForwardBackwardOutput)
        assert isinstance(found, ForwardBackwardOutput) and close(
            [found.metrics["loss:sum"]], [alone.metrics["loss:sum"]]
        )
        assert len(list((tmp_path / "features").iterdir())) == len(captured.loss_fn_outputs) == len(LENGTHS)


LORA, FULL = LoraConfig(rank=4, seed=11), FullConfig()
CAPTURE_CASES = [
    (Case("fsdp=2"), FULL),
    (Case("tp=2"), LORA),
    (Case("sp=2"), LORA),
    *(
        pytest.param(case, training, marks=pytest.mark.full)
        for case, training in (
            *((Case(spec), LORA) for spec in ("fsdp=2", "replicas=2", "sp=2,tp=2", "fsdp=2,sp=2", "fsdp=2,tp=2")),
            *((Case(spec), FULL) for spec in ("tp=2", "sp=2", "replicas=2", "fsdp=2,tp=2")),
            *((Case("ep=2", "qwen3_moe"), training) for training in (LORA, FULL)),
            (Case("tp=2", tp_activations="whole"), LORA),
            (Case("sp=2", heads="6x3-96"), LORA),
            (Case("fsdp=2,tp=2", draft="sp=2,tp=2"), LORA),
        )
    ),
]


class Pair:
    """A trained policy, and a draft whose target it is."""

    def __init__(self, where: Layout, training: TrainingConfig, form: str = "hidden_state") -> None:
        self.where, self.form, self.online = where, form, draft_request("eagle3", 1, *LENGTHS)
        create_draft(where, "eagle3", form)
        where.call("create_run", RunSpec("policy", training))
        inputs = [{"target_tokens": np.roll(datum.tokens, -1), **datum.loss_fn_inputs} for datum in self.online.data]
        data = tuple(replace(datum, loss_fn_inputs=each) for datum, each in zip(self.online.data, inputs, strict=True))
        self.asked = ForwardBackwardRequest("policy", 1, data, "cross_entropy")
        for _ in range(2):  # moves the weights away from the base model's
            where.run_pass(self.asked)
            self.step()
        where.call("set_target", "draft", str(where.saved("policy")))

    def capturing(self, directory: Path) -> ForwardBackwardRequest:
        fields = {name: FORMS[self.form].get(name) for name in ("target_repr", "target_top_k")}
        vocabulary = VOCABULARY.astype(np.int32).tobytes() if self.form == "vocabulary" else b""
        wanted = DraftFeatures("eagle3", (0, 1), **fields, vocabulary=vocabulary)
        return replace(self.asked, features=FeatureLocation(str(directory), draft=wanted))

    def step(self) -> float:
        (metrics,) = self.where.call("apply_steps", (OptimizerStep("policy", ADAM),))
        assert isinstance(metrics, dict), metrics
        return metrics["unclipped_grad_l2:mean"]


def contents(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: load_file(path) for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("case", "training"), CAPTURE_CASES, ids=lambda value: getattr(value, "training", None) or str(value)
)
def test_draft_learns_from_features_captured_by_its_policy(
    case: Case, training: TrainingConfig, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The features equal the draft's own capture, for LoRA and full training under each layout."""
    directory, captured = tmp_path / "features", tmp_path / "captured"
    directory.mkdir()
    with layout(case.model(tiny_models, tmp_path), case.parallel, tmp_path, **case.options) as where:
        pair = Pair(where, training)
        (output,) = where.run_pass(pair.capturing(directory))
        assert isinstance(output, ForwardBackwardOutput), output
        referring(where, pair.online, captured)
        found, wanted = contents(directory), contents(captured)
        assert found.keys() == wanted.keys() and len(found) == len(LENGTHS), "the same target, each sequence once"
        for name, features in wanted.items():
            assert features.keys() == found[name].keys() == {"captured", "hidden_state"}
            for each, values in features.items():
                assert close(found[name][each], values, 1e-5)
                assert not close(np.roll(found[name][each], 1, axis=0), values, 1e-3), (
                    "rows of other tokens must differ"
                )
        offline = with_addresses(pair.online, output, directory)
        losses = learned(where, pair.online)
        assert close(learned(where, offline), losses) and not close(losses, [1.001 * each for each in losses])
        (failure,) = where.run_pass(with_addresses(draft_request("eagle3", 2, *LENGTHS), output, directory))
        assert isinstance(failure, Failure) and "from other tokens" in failure.message
        pair.step()
        (output,) = where.run_pass(pair.capturing(directory))
        assert isinstance(output, ForwardBackwardOutput), output
        (failure,) = where.run_pass(with_addresses(pair.online, output, directory))
        assert isinstance(failure, Failure) and "captured from target" in failure.message, (
            "the policy was trained since"
        )


@pytest.mark.parametrize(
    ("case", "training", "form"),
    [
        (Case("fsdp=2"), FULL, "vocabulary"),
        *(
            pytest.param(case, training, form, marks=pytest.mark.full)
            for case, training in ((Case("tp=2"), LORA), (Case("sp=2"), FULL), (Case("fsdp=2,tp=2"), LORA))
            for form in ("logits", "vocabulary", "top")
        ),
    ],
    ids=lambda value: getattr(value, "training", None) or str(value),
)
def test_policies_capture_their_logits_for_drafts(
    case: Case, training: TrainingConfig, form: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "features"
    directory.mkdir()
    with layout(case.model(tiny_models, tmp_path), case.parallel, tmp_path, **case.options) as where:
        pair = Pair(where, training, form)
        (wanted,) = where.run_pass(pair.asked)
        where.call("clear_gradients", "policy")
        (output,) = where.run_pass(pair.capturing(directory))
        assert isinstance(output, ForwardBackwardOutput) and isinstance(wanted, ForwardBackwardOutput), output
        assert repeatable(output.metrics) == repeatable(wanted.metrics)
        losses = learned(where, pair.online)
        assert close(learned(where, with_addresses(pair.online, output, directory)), losses)
        assert not close(losses, [1.001 * each for each in losses])
        assert pair.step() > 0


@pytest.mark.parametrize("case", [Case("tp=2"), pytest.param(Case("sp=2,tp=2"), marks=pytest.mark.full)], ids=str)
def test_only_one_rank_of_a_team_writes_features(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "captured").mkdir()
    with layout(tiny_models["qwen3"], case.parallel, tmp_path, **case.options) as where:
        pair = Pair(where, LORA)
        captures = FeatureLocation(str(tmp_path / "captured"), captures=True)
        capture = replace(pair.online, loss_fn="capture", loss_fn_config={}, forward_only=True, features=captures)
        share = DataShare(range(len(LENGTHS)), len(LENGTHS))
        for request in (pair.capturing(tmp_path), capture):
            answers = where.answers("run_pass", (OperationPart(where._new_operation(), request, rank_share=share),))
            by_rank = [sum(FEATURES in each for each in output.outputs.values()) for (output,) in answers]
            assert by_rank == [len(LENGTHS), *[0] * (case.parallel.num_ranks - 1)]


@pytest.mark.parametrize(
    "case", [Case("tp=2"), *(pytest.param(Case(spec), marks=pytest.mark.full) for spec in ("fsdp=2", "sp=2"))], ids=str
)
def test_failed_feature_writes_do_not_affect_the_policy(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models["qwen3"], case.parallel, tmp_path, **case.options) as where:
        pair = Pair(where, LORA)
        (wanted,) = where.run_pass(pair.asked)
        assert isinstance(wanted, ForwardBackwardOutput)
        where.call("clear_gradients", "policy")
        (output,) = where.run_pass(pair.capturing(tmp_path / "none"))
        assert isinstance(output, ForwardBackwardOutput), output
        assert all(each.keys() == {"logprobs"} for each in output.loss_fn_outputs)
        assert repeatable(output.metrics) == repeatable(wanted.metrics)
        assert pair.step() > 0
        place = FeatureLocation(str(tmp_path / "none"), captures=True)
        capture = replace(pair.online, loss_fn="capture", loss_fn_config={}, forward_only=True, features=place)
        (failure,) = where.run_pass(capture)
        assert isinstance(failure, Failure) and f"cannot be written to {tmp_path / 'none'}" in failure.message
        assert isinstance(where.run_pass(pair.asked)[0], ForwardBackwardOutput), "no rank is stuck"
