"""Drafts trained on stored features learn bit for bit as from the target, and only from matching features."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file
from torch import Tensor
from trainhouse.schemas.models import Algorithm, DraftConfig, FullConfig, LoraConfig, TrainingConfig
from trainhouse.schemas.training import (
    Datum,
    DraftFeatures,
    FeatureLocation,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)
from trainhouse.workers.drafts.model.version import sums_of
from trainhouse.workers.drafts.sequences.captured_features import CapturedFeatures
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.planner.drafts.draft_load import draft_load
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import Failure, OperationPart, RunSpec
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..adapted import relative_error
from ..model_state import add_noise, change_weights, pending_gradients
from ..parallel.live_bytes import LiveBytes
from ..planner.test_estimate import shape_at
from ..requests import repeatable
from .test_worker import (
    ALGORITHMS,
    SHAPES,
    create_draft,
    new_worker,
    refused,
    request,
    run_pass,
    saved_policy,
    some_data,
    step,
)

SMALL = {"micro_batch_tokens": 40, "head_chunk_tokens": 5}
with_each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
LOGITS: dict[str, dict[str, Any]] = {
    "logits": {"target_repr": "logits"},
    "vocabulary": {"target_repr": "pruned_logits", "draft_vocab_size": 200},
    "top": {"target_repr": "pruned_logits", "target_top_k": 12},
    "top of a vocabulary": {"target_repr": "pruned_logits", "target_top_k": 12, "draft_vocab_size": 200},
}
"""Configurations of drafts that read logits, by name."""
with_each_form = pytest.mark.parametrize("form", LOGITS)


def create_draft_of(worker: Worker, form: str, run_id: str = "draft") -> None:
    fields = LOGITS.get(form, {})
    create_draft(worker, run_id, **fields)
    if "draft_vocab_size" in fields:
        worker.set_vocabulary(run_id, np.arange(20, 220))


def capture_request(data: Sequence[Datum], directory: Path, run_id: str = "draft") -> ForwardBackwardRequest:
    place = FeatureLocation(str(directory), captures=True)
    return ForwardBackwardRequest(run_id, 1, tuple(data), "capture", forward_only=True, features=place)


def capture(worker: Worker, data: Sequence[Datum], directory: Path, run_id: str = "draft") -> list[str]:
    """Captures features of the data, and returns their addresses."""
    directory.mkdir(exist_ok=True)
    (output,) = run_pass(worker, capture_request(data, directory, run_id))
    found = [each["features"].tobytes().decode().split() for each in output.loss_fn_outputs]
    assert [int(size) for _, size in found] == [path_of(directory, address).stat().st_size for address, _ in found]
    return [address for address, _ in found]


def path_of(directory: Path, address: str) -> Path:
    return directory / f"{address}.safetensors"


def with_features(data: Sequence[Datum], addresses: Sequence[str | None]) -> list[Datum]:
    return [
        replace(datum, feature_ref=None if address is None else f"features-{address}-0")
        for datum, address in zip(data, addresses, strict=True)
    ]


def stored(requested: ForwardBackwardRequest, directory: Path) -> ForwardBackwardRequest:
    return replace(requested, features=FeatureLocation(str(directory)))


def learn(
    worker: Worker, requested: ForwardBackwardRequest, run_id: str = "draft"
) -> tuple[ForwardBackwardOutput, Tensor]:
    """Makes one pass, and returns its output and gradient; leaves the draft as it was."""
    (output,) = run_pass(worker, requested)
    gradient = pending_gradients(worker, run_id)
    worker.clear_gradients(run_id)
    return output, gradient


def same(one: tuple[ForwardBackwardOutput, Tensor], other: tuple[ForwardBackwardOutput, Tensor]) -> bool:
    """True if outputs, metrics and gradients are bit-identical."""
    outputs = zip(one[0].loss_fn_outputs, other[0].loss_fn_outputs, strict=True)
    are_outputs = all(np.array_equal(mine["losses"], their["losses"]) for mine, their in outputs)
    return are_outputs and learned(one[0]) == learned(other[0]) and torch.equal(one[1], other[1])


def learned(output: ForwardBackwardOutput) -> dict[str, float]:
    """Returns the metrics that do not depend on time, or on whether the target ran."""
    return {name: value for name, value in repeatable(output.metrics).items() if name != "model_flops:sum"}


@contextmanager
def target_tokens() -> Iterator[list[int]]:
    """Yields a list that collects the token count of each forward of the target."""
    found: list[int] = []
    original = BaseModel.hidden_states

    def counted(base: BaseModel, tokens: Tensor, *arguments: Any, **options: Any) -> Tensor:
        found.append(len(tokens))
        return original(base, tokens, *arguments, **options)

    with mock.patch.object(BaseModel, "hidden_states", counted):
        yield found


@pytest.mark.slow
@with_each_algorithm
@pytest.mark.parametrize("options", [{}, SMALL, {"dtype": "bfloat16"}], ids=["one", "micro-batches", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "cohere_compass"])
def test_stored_features_train_like_the_target_bit_for_bit(
    algorithm: Algorithm, options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    windows: Any = (
        {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind in ("gemma3", "cohere_compass") else {}
    )
    tiny_model(kind, tmp_path / "model", num_hidden_layers=4, **windows)
    worker = new_worker(tmp_path / "model", **options)
    create_draft(worker, algorithm=algorithm)
    worker.set_target("draft", str(saved_policy(worker, tmp_path, 5)))
    data = some_data(1)
    requested = request(data, loss_fn=algorithm)
    online = learn(worker, requested)
    addresses = capture(worker, data, tmp_path / "features")
    referring = stored(request(with_features(data, addresses), loss_fn=algorithm), tmp_path / "features")
    with target_tokens() as runs:
        assert same(learn(worker, referring), online)
        assert not runs, "the target ran"
    change_weights(worker, "draft", lambda each: each + 1e-3)
    assert not same(learn(worker, referring), online), "a small change of the weights must show"


def equal_up_to_rounding(
    found: tuple[ForwardBackwardOutput, Tensor], wanted: tuple[ForwardBackwardOutput, Tensor], error: float = 5e-6
) -> bool:
    """True if gradients and all metrics are. Products of few rows sum in another order than those of many."""
    metrics = [learned(each) for each, _ in (found, wanted)]
    assert metrics[0].keys() == metrics[1].keys()
    are_metrics = all(value == pytest.approx(metrics[1][name], rel=10 * error) for name, value in metrics[0].items())
    return are_metrics and relative_error(found[1], wanted[1]) < error


HALF = {"dtype": "bfloat16", **SMALL}


@with_each_form
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3", {}), ("qwen3", SMALL), ("qwen3", HALF), ("gemma2", {}), ("gemma2", SMALL)],
    ids=["one", "micro-batches", "bfloat16", "capped logits", "capped logits in micro-batches"],
)
def test_stored_logits_train_like_the_target_read_in_the_same_form(
    form: str, options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    tiny_model(kind, tmp_path / "model")
    worker, features = new_worker(tmp_path / "model", **options), tmp_path / "features"
    create_draft_of(worker, form)
    worker.set_target("draft", str(saved_policy(worker, tmp_path, 5)))
    data = some_data(1)
    # Products that sum in another order may round to the next of bfloat16's numbers, 1/256 away.
    error, change = (2e-3, 1e-2) if options is HALF else (5e-6, 1e-3)
    online = learn(worker, request(data))
    referring = stored(request(with_features(data, capture(worker, data, features))), features)
    with target_tokens() as runs:
        found = learn(worker, referring)
        assert not runs, "the target ran"
    assert found[0].metrics["model_flops:sum"] < online[0].metrics["model_flops:sum"]
    assert equal_up_to_rounding(found, online, error)
    if options is not HALF:
        create_draft(worker, "exact", draft_vocab_size=LOGITS[form].get("draft_vocab_size"))
        if "draft_vocab_size" in LOGITS[form]:
            worker.set_vocabulary("exact", np.arange(20, 220))
        worker.set_target("exact", str(tmp_path / "policy-5"))
        exact = learn(worker, request(data, "exact"), "exact")
        assert equal_up_to_rounding(found, exact) is not form.startswith("top"), "only the top logits approximate"
    change_weights(worker, "draft", lambda each: each + change)
    assert not equal_up_to_rounding(learn(worker, referring), online, error), "a change of the weights must show"


@with_each_form
def test_stored_logits_mix_in_any_order_with_data_that_run_the_target(
    form: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    worker = new_worker(tiny_models["qwen3"], **SMALL)
    create_draft_of(worker, form)
    data = some_data(1, (9, 30, 4, 17, 11, 11))
    wanted = learn(worker, request(data))
    addresses: list[str | None] = [*capture(worker, data, tmp_path)]
    for unknown in ((1, 4), (0,), (2, 3, 5)):
        given = [None if number in unknown else address for number, address in enumerate(addresses)]
        with target_tokens() as runs:
            found = learn(worker, stored(request(with_features(data, given)), tmp_path))
            assert sum(runs) == sum(len(data[number].tokens) for number in unknown)
        assert equal_up_to_rounding(found, wanted)


@with_each_algorithm
def test_data_captured_in_other_batches_mix_in_any_order_with_others(
    algorithm: Algorithm, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    worker = new_worker(tiny_models["qwen3"], **SMALL)
    create_draft(worker, algorithm=algorithm)
    data = some_data(1, (9, 30, 4, 17, 11, 11))
    addresses: dict[int, str | None] = {}
    for numbers in ([5, 0], [2], [3]):
        found = capture(worker, [data[number] for number in numbers], tmp_path / "features")
        addresses |= zip(numbers, found, strict=True)
    whole, gradient = learn(worker, request(data, loss_fn=algorithm))
    referring = with_features(data, [addresses.get(number) for number in range(len(data))])
    with target_tokens() as runs:
        output, found_gradient = learn(worker, stored(request(referring, loss_fn=algorithm), tmp_path / "features"))
        assert sum(runs) == 30 + 11, "only data without a reference run the target"
    # The target's products of few rows sum in another order than those of many.
    assert relative_error(found_gradient, gradient) < 5e-6 < relative_error(1.0001 * found_gradient, gradient)
    assert output.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
    for mine, other in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(mine["losses"], other["losses"], atol=1e-5)


def test_identical_data_are_stored_and_run_once(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker = new_worker(tiny_models["llama"])
    create_draft(worker)
    create_draft(worker, "other")
    first, second = some_data(1, (9, 30)), some_data(2, (8,))
    addresses = capture(worker, first, tmp_path)
    with target_tokens() as runs:
        assert capture(worker, first, tmp_path, "other") == addresses, "the target is the same"
        assert not runs
        again = capture(worker, (first[1], *second, first[0], *second), tmp_path)
        assert sum(runs) == 16 and again[0::2] == [addresses[1], addresses[0]] and again[1] == again[3]
    assert len(list(tmp_path.iterdir())) == 3, "no temporary files are left"


def test_features_belong_to_one_target(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Targets are identified by their weights, not by their directory."""
    worker = new_worker(tiny_models["llama"])
    data = some_data(1, (9,))
    found = {}
    policies = {seed: saved_policy(worker, tmp_path / str(seed), seed) for seed in (5, 6)}
    again = saved_policy(worker, tmp_path / "again", 5)
    for name, target in {"base": None, "a": policies[5], "b": policies[6], "again": again}.items():
        create_draft(worker, name)
        worker.set_target(name, None if target is None else str(target))
        (found[name],) = capture(worker, data, tmp_path / "features", name)
    assert found["a"] == found["again"] and len(set(found.values())) == 3
    worker.set_target("a", None)
    assert capture(worker, data, tmp_path / "features", "a") == [found["base"]]
    full = new_worker(tiny_models["llama"], dtype="bfloat16")
    create_draft(full)
    assert capture(full, data, tmp_path / "features") != [found["base"]]


def test_checksums_distinguish_vectors() -> None:
    """These checksums identify weights on a GPU."""
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(1))

    def changed(*places: int, by: float = -1.0) -> Tensor:
        other = vector.clone()
        other[list(places)] *= by
        return other

    swapped = vector.clone()
    swapped[[3, 70_000]] = vector[[70_000, 3]]
    ulp = vector.clone()
    ulp[99_999] = torch.nextafter(ulp[99_999], torch.tensor(9.0))
    others = [changed(5), changed(5, 6), changed(5, 99_999), changed(7, by=2.0), swapped, ulp, vector[:-1], -vector]
    checksums = [sums_of(each) for each in (vector, *others)]
    assert torch.equal(checksums[0], sums_of(vector.clone())) and checksums[0].shape == (2, 2)
    assert len({str(each.tolist()) for each in checksums}) == len(checksums)


Stored = tuple[Worker, tuple[Datum, ...], list[str]]


@pytest.fixture
def stored_data(tiny_models: dict[str, Path], tmp_path: Path) -> Stored:
    """Returns a worker with a draft, data, and the addresses of their features."""
    worker, data = new_worker(tiny_models["llama"]), some_data(1, (9, 30))
    create_draft(worker)
    return worker, data, capture(worker, data, tmp_path / "features")


def refusal(worker: Worker, data: Sequence[Datum], addresses: Sequence[str], directory: Path, **fields: Any) -> str:
    return refused(worker, stored(request(with_features(data, addresses), **fields), directory / "features"))


@pytest.mark.parametrize(
    ("captured", "reads", "message"),
    [
        ({}, {"capture_layers": (0,)}, "0, 1 with hidden_state, but the draft reads 0 with hidden_state"),
        ({}, {"algorithm": "dflash", "capture_layers": (0, 1)}, "0, 1 with hidden_state, but the draft reads 0, 1:"),
        ({}, "logits", "hidden_state, but the draft reads 0, 1 with logits"),
        ("logits", {}, "logits, but the draft reads 0, 1 with hidden_state"),
        ("logits", "vocabulary", "logits, but the draft reads 0, 1 with pruned_logits of vocabulary "),
        ("top", "vocabulary", "the top 12, but the draft reads 0, 1 with pruned_logits of vocabulary "),
        (
            "top",
            {**LOGITS["top"], "target_top_k": 13},
            "the top 12, but the draft reads 0, 1 with pruned_logits of the",
        ),
    ],
)
def test_features_of_other_layers_or_another_form_are_refused_by_name(
    captured: Any, reads: Any, message: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    worker, data = new_worker(tiny_models["llama"]), some_data(1, (9, 30))
    for run_id, fields in (("other", captured), ("draft", reads)):
        create_draft_of(worker, fields, run_id) if isinstance(fields, str) else create_draft(worker, run_id, **fields)
    algorithm = "eagle3" if isinstance(reads, str) else reads.get("algorithm", "eagle3")
    addresses = capture(worker, data, tmp_path / "features", "other")
    found = refusal(worker, data, addresses, tmp_path, loss_fn=algorithm)
    assert "datum 0: its feature_ref names features captured from layers 0, 1 with " in found and message in found
    assert found.endswith(": capture them again with this draft")


def test_features_of_another_vocabulary_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker, data, features = new_worker(tiny_models["llama"]), some_data(1, (9,)), tmp_path / "features"
    create_draft_of(worker, "vocabulary")
    before = capture(worker, data, features)
    assert capture(worker, data, features) == before
    worker.set_vocabulary("draft", np.arange(200))
    assert refusal(worker, data, before, tmp_path).count("with pruned_logits of vocabulary ") == 2
    assert capture(worker, data, features) != before


def test_logits_are_captured_for_a_vocabulary_only_once_it_is_chosen(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    worker = new_worker(tiny_models["llama"])
    create_draft(worker, "hidden", draft_vocab_size=200)
    assert len(capture(worker, some_data(1), tmp_path, "hidden")) == 4, "hidden states need no vocabulary"
    create_draft(worker, **LOGITS["vocabulary"])
    assert "call build_vocab_map with your corpus first" in refused(worker, capture_request(some_data(1), tmp_path))
    worker.set_vocabulary("draft", np.arange(20, 220))
    assert len(capture(worker, some_data(1), tmp_path)) == 4


def test_features_of_other_tokens_are_refused(stored_data: Stored, tmp_path: Path) -> None:
    worker, data, addresses = stored_data
    message = refusal(worker, data, addresses[::-1], tmp_path)
    assert "captured from other tokens than its model_input" in message


def test_features_of_an_earlier_version_are_refused(stored_data: Stored, tmp_path: Path) -> None:
    worker, data, addresses = stored_data
    earlier, features = {"target": "a", "layers": "0,1,last", "dtype": "float32"}, tmp_path / "features"
    save_file(load(path_of(features, addresses[0]).read_bytes()), path_of(features, "0" * 32), earlier)
    message = refusal(worker, data, ["0" * 32, addresses[1]], tmp_path)
    assert "captured by an earlier version of the server: capture" in message


def test_features_of_another_target_are_refused(stored_data: Stored, tmp_path: Path) -> None:
    worker, data, addresses = stored_data
    version = worker._models.get("draft").target_version
    worker.set_target("draft", str(saved_policy(worker, tmp_path, 5)))
    message = refusal(worker, data, addresses, tmp_path)
    assert f"names features captured from target {version}, but the draft's target is" in message
    worker.set_target("draft", None)
    learn(worker, stored(request(with_features(data, addresses)), tmp_path / "features"))


def test_features_in_another_precision_are_refused(
    stored_data: Stored, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    _, data, addresses = stored_data
    halved = new_worker(tiny_models["llama"], dtype="bfloat16")
    create_draft(halved)
    message = refusal(halved, data, addresses, tmp_path)
    assert "names features captured in float32, but the draft's target runs in bfloat16" in message


@pytest.mark.parametrize("damage", ["gone", "cut", "short", "flipped"])
def test_missing_or_damaged_features_are_recomputed_by_the_target(
    damage: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """An operation that is repeated after a crash may find its features deleted."""
    worker = new_worker(tiny_models["llama"])
    create_draft(worker)
    data = some_data(1)
    online = learn(worker, request(data))
    addresses = capture(worker, data, tmp_path)
    for address in addresses:
        path = path_of(tmp_path, address)
        with safe_open(path, framework="pt") as file:
            metadata, whole = file.metadata(), path.read_bytes()
        path.unlink()
        if damage == "cut":
            path.write_bytes(whole[:200])
        elif damage == "short":
            save_file({name: each[1:] for name, each in load(whole).items()}, path, metadata)
        elif damage == "flipped":
            path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 0x40]) + whole[-8:])
    requested = stored(request(with_features(data, addresses)), tmp_path)
    assert same(learn(worker, requested), online)
    assert capture(worker, data, tmp_path) == addresses, "capturing again repairs the files"
    with target_tokens() as runs:
        assert same(learn(worker, requested), online) and not runs
    without_checksums = path_of(tmp_path, addresses[0])  # as earlier versions wrote them
    with safe_open(without_checksums, framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "crc32"}
    save_file(load(without_checksums.read_bytes()), without_checksums, metadata)
    with target_tokens() as runs:
        assert same(learn(worker, requested), online) and not runs


def test_capture_does_not_change_the_draft(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker = new_worker(tiny_models["llama"])
    create_draft(worker)
    run_pass(worker, request(some_data(1)))
    before = pending_gradients(worker, "draft")
    capture(worker, some_data(2), tmp_path)
    assert torch.equal(pending_gradients(worker, "draft"), before)


def test_policies_cannot_use_captured_features(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker = new_worker(tiny_models["llama"])
    worker.create_run(RunSpec("policy", LoraConfig(rank=4, seed=1)))
    assert "only drafts" in refused(worker, capture_request(some_data(1), tmp_path, "policy"))


def test_unwritable_directory_fails_only_the_capture(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker = new_worker(tiny_models["llama"])
    create_draft(worker)
    requested = capture_request(some_data(1), tmp_path / "none")
    failure, output = worker.run_pass(
        (OperationPart(0, requested), OperationPart(1, request(some_data(1), forward_only=True)))
    )
    assert isinstance(failure, Failure) and failure.category == "server" and "cannot be written to" in failure.message
    assert isinstance(output, ForwardBackwardOutput)


def test_open_features_survive_deletion_of_the_file(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    worker = new_worker(tiny_models["llama"])
    create_draft(worker)
    (address,) = capture(worker, some_data(1, (9,)), tmp_path)
    features = CapturedFeatures.find(tmp_path, address)
    path_of(tmp_path, address).unlink()
    assert features is not None and CapturedFeatures.find(tmp_path, address) is None
    tensor = features.tensor("captured")
    assert len(tensor) == 9


def planned_bytes(model: Path, config: DraftConfig, dtype: str) -> int:
    """Returns what `trainhouse plan` says of such a draft."""
    sizes = {name: size for name in ("draft_vocab_size", "target_top_k") if (size := getattr(config, name))}
    draft = draft_load(shape_at(model), config.algorithm, sizes, Workload(longest=512, dtype=dtype))
    found = draft.captured_bytes(2 if dtype == "bfloat16" else 4)
    top_k, target_repr = config.target_top_k, config.target_repr or "hidden_state"
    pruned_to = f", top {top_k}" if top_k else f", {config.draft_vocab_size} tokens"
    name = target_repr + (pruned_to if target_repr == "pruned_logits" else "")
    return found["without the target's distribution" if config.algorithm == "dflash" else name]


def test_feature_bytes_per_token_are_known_in_advance(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        worker = new_worker(tiny_models["llama"], dtype=dtype)
        drafts = [(algorithm, SHAPES[algorithm]) for algorithm in ALGORITHMS]
        for number, (algorithm, fields) in enumerate([*drafts, *(("eagle3", each) for each in LOGITS.values())]):
            config = DraftConfig(algorithm=algorithm, seed=3, **fields)  # pyright: ignore[reportArgumentType]
            info = worker.create_run(RunSpec(str(number), config, "draft"))
            if config.draft_vocab_size:
                worker.set_vocabulary(str(number), np.arange(config.draft_vocab_size))
            directory = tmp_path / dtype / str(number)
            directory.mkdir(parents=True)
            (address,) = capture(worker, some_data(1, (499,)), directory, str(number))
            header = path_of(directory, address).stat().st_size - 499 * info.feature_bytes
            assert 0 < header < 1000
            assert info.feature_bytes == planned_bytes(tiny_models["llama"], config, dtype)


@pytest.mark.parametrize("form", ["logits", "top"])
def test_captured_logits_do_not_exist_in_memory_at_the_same_time(form: str, tmp_path: Path) -> None:
    vocab_size, length, most = 40_000, 500, 20
    worker = new_worker(tiny_model("qwen3", tmp_path / "model", vocab_size=vocab_size), head_chunk_tokens=most)
    create_draft_of(worker, form)
    with LiveBytes() as live:
        capture(worker, some_data(1, (length,)), tmp_path / "features")
    chunk, hidden = 4 * vocab_size * most, 100 * 4 * 64 * length
    assert live.peak < 4 * chunk + hidden < 4 * vocab_size * length / 3


# One forward of the target for policy and draft

LORA, FULL = LoraConfig(rank=4, seed=1), FullConfig()


class Pair:
    """A policy in training, and a draft whose target is a saved checkpoint of it."""

    def __init__(
        self, worker: Worker, algorithm: Algorithm, tmp_path: Path, training: TrainingConfig = LORA, form: str = ""
    ) -> None:
        self.worker, self.algorithm, self.features = worker, algorithm, tmp_path / "features"
        self.features.mkdir()
        worker.create_run(RunSpec("policy", training))
        add_noise(worker, "policy", 0.2 if training is LORA else 0.02, seed=1)
        create_draft_of(worker, form) if form else create_draft(worker, algorithm=algorithm)
        self._saved = tmp_path / "saved"
        self.retarget()

    def retarget(self) -> None:
        self._saved = self._saved.with_name(f"{self._saved.name}-again")
        self._saved.mkdir()
        self.worker.save_run("policy", str(self._saved), optimizer=True)
        self.worker.set_target("draft", str(self._saved))

    def of_policy(self, data: Sequence[Datum], forward_only: bool = False, captures: bool = True) -> Any:
        """Returns a request that also captures features for the draft, if `captures`."""
        weighted = [
            Datum(each.tokens[:-1], {**each.loss_fn_inputs, "target_tokens": each.tokens[1:].astype(np.int64)})
            for each in data
        ]
        weighted = [replace(each, loss_fn_inputs={**each.loss_fn_inputs, "weights": _ones(each)}) for each in weighted]
        draft = self.worker._models.get("draft")
        wanted = DraftFeatures(
            self.algorithm,
            tuple(draft.capture_layers),
            draft.draft.target_repr,
            draft.draft.target_top_k,
            draft.vocabulary.int().numpy().tobytes(),
        )
        place = FeatureLocation(str(self.features), draft=wanted) if captures else None
        return ForwardBackwardRequest(
            "policy", 1, tuple(weighted), "cross_entropy", forward_only=forward_only, features=place
        )

    def of_draft(self, data: Sequence[Datum], output: ForwardBackwardOutput | None) -> ForwardBackwardRequest:
        plain = [Datum(each.tokens[:-1]) for each in data]
        if output is None:
            return request(plain, loss_fn=self.algorithm)
        addresses = [each["features"].tobytes().decode().split()[0] for each in output.loss_fn_outputs]
        return stored(request(with_features(plain, addresses), loss_fn=self.algorithm), self.features)


def _ones(datum: Datum) -> np.ndarray:
    return np.ones(len(datum.tokens), np.float32)


@pytest.mark.slow
@with_each_algorithm
@pytest.mark.parametrize(
    "options", [{}, SMALL, {"activations": "recompute"}], ids=["one", "micro-batches", "recompute"]
)
@pytest.mark.parametrize("forward_only", [False, True], ids=["forward_backward", "forward"])
@pytest.mark.parametrize("training", [LORA, FULL], ids=["lora", "full"])
def test_one_forward_of_a_policy_also_captures_for_its_draft(
    algorithm: Algorithm,
    options: dict[str, Any],
    forward_only: bool,
    training: TrainingConfig,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    pair = Pair(new_worker(tiny_models["qwen3"], **options), algorithm, tmp_path, training)
    worker, data = pair.worker, some_data(1, (9, 30, 4, 17))
    # Another run's data in the same micro-batches; nothing is captured for it.
    worker.create_run(RunSpec("other", LoraConfig(rank=4, seed=2)))
    other = replace(pair.of_policy(some_data(2), forward_only, captures=False), model_id="other")
    (alone, _) = run_pass(worker, pair.of_policy(data, forward_only, captures=False), other)
    wanted = torch.empty(0)
    if not forward_only:
        wanted = pending_gradients(worker, "policy")
        worker.clear_gradients("policy")
    (output, theirs) = run_pass(worker, pair.of_policy(data, forward_only), other)
    assert repeatable(output.metrics) == repeatable(alone.metrics)
    assert "features" not in theirs.loss_fn_outputs[0]
    assert len(list(pair.features.iterdir())) == len(data)
    if not forward_only:
        assert torch.equal(pending_gradients(worker, "policy"), wanted), "the capture changed the policy's gradient"
        step(worker, "policy")
        step(worker, "other")
    online, gradient = learn(worker, pair.of_draft(data, None))
    with target_tokens() as runs:
        offline, found = learn(worker, pair.of_draft(data, output))
        assert not runs
    assert relative_error(found, gradient) < 1e-4
    assert offline.metrics["loss:sum"] == pytest.approx(online.metrics["loss:sum"], rel=1e-5)
    if not forward_only:
        pair.retarget()
        moved, other_gradient = learn(worker, pair.of_draft(data, None))
        assert relative_error(other_gradient, found) > 1e-3
        assert moved.metrics["loss:sum"] != pytest.approx(online.metrics["loss:sum"], rel=1e-4), "a step must show"
        message = refused(worker, pair.of_draft(data, output))
        assert "datum 0: its feature_ref names features captured from target" in message


@pytest.mark.parametrize("form", ["hidden_state", *LOGITS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", [LORA, FULL], ids=["lora", "full"])
def test_policy_captures_what_its_draft_would_capture(
    training: TrainingConfig, dtype: str, form: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    pair = Pair(new_worker(tiny_models["qwen3"], dtype=dtype), "eagle3", tmp_path, training, form)
    data = some_data(1)
    (output,) = run_pass(pair.worker, pair.of_policy(data))
    addresses = [each["features"].tobytes().decode().split()[0] for each in output.loss_fn_outputs]
    with target_tokens() as runs:
        assert capture(pair.worker, [Datum(each.tokens[:-1]) for each in data], pair.features) == addresses
        assert not runs
    if dtype == "float32":  # in bfloat16 the policy's pass rounds otherwise than its draft's
        online, found = (learn(pair.worker, pair.of_draft(data, each)) for each in (None, output))
        assert equal_up_to_rounding(found, online)
        change_weights(pair.worker, "draft", lambda each: each + 1e-3)
        assert not equal_up_to_rounding(learn(pair.worker, pair.of_draft(data, output)), online)


def test_critics_cannot_capture_for_a_draft(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    pair = Pair(new_worker(tiny_models["qwen3"]), "eagle3", tmp_path)
    pair.worker.create_run(RunSpec("critic", LORA, "critic"))
    data = [replace(each, loss_fn_inputs={"returns": _ones(each)}) for each in pair.of_policy(some_data(1)).data]
    requested = replace(pair.of_policy(()), model_id="critic", loss_fn="value_mse", data=tuple(data))
    assert refused(pair.worker, requested) == "capture_for is only for policies, and this is a critic: leave it out"


def test_policy_continues_if_features_cannot_be_written(
    tiny_models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(new_worker(tiny_models["qwen3"], **SMALL), "eagle3", tmp_path)
    data = some_data(1, (9, 30, 4, 17))
    wanted, gradient = learn(pair.worker, pair.of_policy(data, captures=False), "policy")
    pair.features.rmdir()
    for number in (1, 2):
        output, found = learn(pair.worker, pair.of_policy(data), "policy")
        assert repeatable(output.metrics) == repeatable(wanted.metrics) and torch.equal(found, gradient)
        assert all(each.keys() == {"logprobs"} for each in output.loss_fn_outputs)
        assert caplog.text.count("continues without the features") == number, "one log line per operation"
