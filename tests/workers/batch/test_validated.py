"""Validation of requests: what is refused and how, and which defaults are filled in."""

from contextlib import nullcontext

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.batch.validated import validate_request
from trainhouse.workers.losses import Loss
from trainhouse.workers.losses.cross_entropy import CROSS_ENTROPY
from trainhouse.workers.protocol.calls import DataShare

from ..requests import LIMITS, read, sampled, supervised


def without(datum: Datum, name: str) -> Datum:
    return Datum(datum.tokens, {key: value for key, value in datum.loss_fn_inputs.items() if key != name})


nan_at_two = np.array([1, 1, np.nan, 1], np.float32)

REFUSED = {
    "empty batch": ((), {}, ["batch is empty"]),
    "empty sequence": ((supervised(4), supervised(0)), {}, ["datum 1", "empty"]),
    "too long": ((supervised(17),), {}, ["datum 0", "17 tokens", "16", "shorten"]),
    "token beyond the vocabulary": (
        (supervised(4), Datum(np.array([5, 100], np.int32), supervised(2).loss_fn_inputs)),
        {},
        ["datum 1", "token id 100", "position 1", "0 to 99"],
    ),
    "negative token": (
        (Datum(np.array([-3], np.int32), supervised(1).loss_fn_inputs),),
        {},
        ["datum 0", "token id -3"],
    ),
    "target beyond the vocabulary": (
        (supervised(2, target_tokens=np.array([1, -100])),),
        {},
        ["target_tokens", "-100", "position 1", "weight"],
    ),
    "float tokens": (
        (Datum(np.ones(2, np.float32), supervised(2).loss_fn_inputs),),
        {},
        ["model_input", "float32", "integers"],
    ),
    "float targets": ((supervised(2, target_tokens=np.ones(2)),), {}, ["target_tokens", "float64", "integers"]),
    "targets of another length": (
        (supervised(4, target_tokens=np.arange(3)),),
        {},
        ["datum 0", "3 positions", "model_input 4"],
    ),
    "weights of another length": ((supervised(4, weights=np.ones(3, np.float32)),), {}, ["weights", "[3]", "[4]"]),
    "weights of another rank": ((supervised(4, weights=np.ones((4, 2), np.float32)),), {}, ["weights", "[4, 2]"]),
    "weights of text": ((supervised(1, weights=np.array(["a"])),), {}, ["weights", "numeric"]),
    "NaN weight": ((supervised(4), supervised(4, weights=nan_at_two)), {}, ["datum 1", "weights is nan", "position 2"]),
    "weight beyond float32": ((supervised(1, weights=np.array([1e39])),), {}, ["weights is inf", "position 0"]),
    "missing targets": ((without(supervised(4), "target_tokens"),), {}, ["cross_entropy needs", "target_tokens"]),
    "unknown input": ((supervised(4, mask=np.ones(4)),), {}, ["no input mask", "target_tokens", "weights"]),
    "unknown loss": (
        (supervised(4),),
        {"loss_fn": "mse"},
        ["unknown loss_fn 'mse'", "cross_entropy, importance_sampling"],
    ),
    "labels": (
        (Datum(np.arange(3, dtype=np.int32), {"labels": np.arange(3, dtype=np.int32)}),),
        {},
        ["needs the input target_tokens", "and not labels"],
    ),
    "a name of other libraries": (
        (supervised(4),),
        {"loss_fn": "GRPO"},
        ["it is importance_sampling, or ppo, with the"],
    ),
    "an epsilon": ((sampled(4),), {"loss_fn": "ppo", "config": {"clip_epsilon": 0.2}}, ["0.2 is written 0.8 and 1.2"]),
    "config of a loss without": ((supervised(4),), {"config": {"beta": 1.0}}, ["no config key 'beta'", "takes none"]),
    "unknown config": ((sampled(4),), {"loss_fn": "ppo", "config": {"eps": 1.0}}, ["'eps'", "clip_low_threshold"]),
    "text config": ((sampled(4),), {"loss_fn": "dro", "config": {"beta": "big"}}, ["beta", "'big'", "number"]),
    "bounds that are not on the ratio": (
        (sampled(4),),
        {"loss_fn": "ppo", "config": {"clip_high_threshold": 0.2}},
        ["0.8 exceeds", "0.2", "0.8 and 1.2"],
    ),
    "missing advantages": (
        (sampled(4), without(sampled(4), "advantages")),
        {"loss_fn": "ppo"},
        ["datum 1", "ppo needs the input advantages"],
    ),
    "NaN advantage": ((sampled(4, advantages=nan_at_two),), {"loss_fn": "ppo"}, ["advantages is nan", "position 2"]),
    "NaN logprob where it is read": (
        (sampled(4, logprobs=nan_at_two),),
        {"loss_fn": "ppo"},
        ["logprobs is nan", "position 2"],
    ),
    "NaN logprob in the ratio of a sequence": (
        (sampled(4, logprobs=nan_at_two, advantages=np.array([0, 0, 0, 1]), sequence_ratio_mask=np.ones(4)),),
        {"loss_fn": "gspo"},
        ["logprobs is nan", "position 2"],
    ),
    "targets [T, K] for another loss": (
        (sampled(4, target_tokens=np.ones((4, 2), np.int64)),),
        {"loss_fn": "ppo"},
        ["[4, 2]", "ppo takes [T]"],
    ),
    "NaN in the second of K": (
        (supervised(2, target_tokens=np.ones((2, 2), np.int64), weights=np.array([[1, 1], [1, np.nan]])),),
        {},
        ["weights is nan", "position 1"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_data_is_refused_with_the_value_and_the_remedy(case: str) -> None:
    data, options, fragments = REFUSED[case]
    with pytest.raises(OperationError) as refusal:
        read(*data, **options)
    assert refusal.value.category == "user"
    for fragment in fragments:
        assert fragment in refusal.value.message


def test_unused_sampler_logprobs_need_not_be_finite() -> None:
    operation = read(
        sampled(4, logprobs=np.array([-np.inf, np.nan, -1, -1]), advantages=np.array([0, 0, 1, 1])), loss_fn="ppo"
    )
    assert operation.num_tokens == 2


def test_the_input_that_counts_decides_which_sampler_logprobs_are_read() -> None:
    """No loss of ours reads `logprobs` and counts by `weights`."""
    loss = Loss(CROSS_ENTROPY.function, required=("logprobs", "weights"), counted_by="weights")
    logprobs = np.array([np.nan, -1], np.float32)
    for weights, is_refused in (([0, 1], False), ([1, 0], True)):
        datum = supervised(2, weights=np.array(weights, np.float32), logprobs=logprobs)
        request = ForwardBackwardRequest("run", 1, (datum,), "ours")
        with pytest.raises(OperationError, match="position 0") if is_refused else nullcontext():
            validate_request(request, LIMITS, losses={"ours": loss})


def test_absent_optional_inputs_are_filled() -> None:
    absent = read(without(supervised(3), "weights")).examples[0].inputs["weights"]
    assert absent.tolist() == [1, 1, 1]
    advantages = np.array([0, 2, -1], np.float32)
    inputs = (
        read(sampled(3, advantages=advantages), loss_fn="gspo", config={"clip_low_threshold": 0.5}).examples[0].inputs
    )
    assert inputs["sequence_ratio_mask"].tolist() == [0, 1, 1]
    assert inputs["clip_low_threshold"].tolist() == [0.5] * 3
    per_token = np.array([0.1, 0.2, 0.3], np.float32)
    given = read(sampled(3, clip_low_threshold=per_token), sampled(2), loss_fn="ppo")
    assert given.examples[0].inputs["clip_low_threshold"].tolist() == per_token.tolist()
    assert given.examples[1].inputs["clip_low_threshold"].tolist() == np.float32([0.8, 0.8]).tolist()


def test_integer_weights_become_float32() -> None:
    operation = read(supervised(3, weights=np.array([0, 1, -2])))
    assert operation.examples[0].inputs["weights"].dtype == np.float32
    assert (operation.num_tokens, operation.denominator) == (2, -1.0)


@pytest.mark.parametrize(
    "bad",
    [
        without(supervised(4), "target_tokens"),
        supervised(4, weights=np.ones(3, np.float32)),
        Datum(np.array([5, 100], np.int32), supervised(2).loss_fn_inputs),
        supervised(2, target_tokens=np.array([1, -100])),
        supervised(4, weights=nan_at_two),
    ],
)
def test_errors_number_data_within_the_whole_operation(bad: Datum) -> None:
    part = ForwardBackwardRequest("run", 1, (supervised(4), bad), "cross_entropy")
    with pytest.raises(OperationError, match="datum 8:"):
        validate_request(part, LIMITS, DataShare(range(7, 7 + len(part.data)), len(part.data)))


def test_operations_that_agree_in_loss_config_and_weight_are_scored_together() -> None:
    ppo = read(sampled(4), loss_fn="ppo").loss_key
    assert ppo == read(sampled(3), sampled(2), loss_fn="ppo").loss_key
    others = [
        read(sampled(4), loss_fn="cispo"),
        read(sampled(4), loss_fn="ppo", config={"clip_high_threshold": 1.5}),
        read(sampled(4), loss_fn="ppo", weight=0.5),
    ]
    assert len({ppo, *(other.loss_key for other in others)}) == 4
    several = supervised(2, target_tokens=np.ones((2, 2), np.int64), weights=np.ones((2, 2), np.float32))
    assert read(several).loss_key != read(supervised(2)).loss_key
