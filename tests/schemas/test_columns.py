"""Batches stored as columns: unpickling returns the same data for uniform and for mixed batches."""

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest, ProvenanceSpan

SPAN = ProvenanceSpan("sampled", "sequence", 3, 4)


def datum(length: int, num_targets: int = 0, inputs: Mapping[str, np.ndarray] | None = None) -> Datum:
    shape = (length, num_targets) if num_targets else (length,)
    random = np.random.default_rng(length)
    targets = {"target_tokens": random.integers(0, 9, shape), "weights": random.random(shape, np.float32)}
    return Datum(random.integers(0, 9, length).astype(np.int32), targets | dict(inputs or {}))


BATCHES = {
    "few": [datum(3)],
    "of many lengths": [datum(length) for length in range(1, 40)],
    "of several targets a position": [datum(length, num_targets=1 + length % 3) for length in range(1, 20)],
    "of one and of several targets": [datum(length, num_targets=length % 2) for length in range(1, 20)],
    "with other inputs": [datum(5, inputs={"advantages": np.ones(5)} if i % 2 else {}) for i in range(20)],
    "of other dtypes": [datum(5, inputs={"mask": np.ones(5, np.float64 if i % 2 else np.float32)}) for i in range(20)],
    "with empty inputs": [datum(4, inputs={"mask": np.ones((0, 2), np.float32)}) for _ in range(20)],
    "without inputs": [Datum(np.ones(2, np.int32)) for _ in range(20)],
    "with spans": [Datum(np.ones(7, np.int32), {}, (SPAN,) * (i % 2), (SPAN, SPAN)) for i in range(20)],
}


def assert_same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name], strict=True)


@pytest.mark.parametrize("name", BATCHES)
def test_a_pickled_request_is_unchanged(name: str) -> None:
    data = tuple(BATCHES[name])
    request = ForwardBackwardRequest("run", 7, data, "ppo", {"clip_low_threshold": 0.8}, True, 0.5)
    copy = pickle.loads(pickle.dumps(request, protocol=5))
    assert len(copy.data) == len(data)
    for got, sent in zip(copy.data, data, strict=True):
        assert_same({"tokens": got.tokens, **got.loss_fn_inputs}, {"tokens": sent.tokens, **sent.loss_fn_inputs})
        assert got.model_input_spans == sent.model_input_spans
        assert got.loss_fn_input_spans == sent.loss_fn_input_spans
    assert (copy.model_id, copy.seq_id, copy.loss_fn) == ("run", 7, "ppo")
    assert (copy.loss_fn_config, copy.forward_only, copy.loss_weight) == ({"clip_low_threshold": 0.8}, True, 0.5)


@pytest.mark.parametrize("name", ["none", *BATCHES])
def test_a_pickled_output_is_unchanged(name: str) -> None:
    outputs = tuple(datum.loss_fn_inputs for datum in BATCHES.get(name, []))
    copy = pickle.loads(pickle.dumps(ForwardBackwardOutput(outputs, {"loss:sum": 0.5}, "array"), protocol=5))
    assert (copy.metrics, copy.loss_fn_output_type, len(copy.loss_fn_outputs)) == (
        {"loss:sum": 0.5},
        "array",
        len(outputs),
    )
    for got, sent in zip(copy.loss_fn_outputs, outputs, strict=True):
        assert_same(got, sent)
