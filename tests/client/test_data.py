"""Data that the user passes becomes the schema's arrays, is sent in chunks, and is answered as one result."""

import numpy as np
import pytest
import torch
import trainhouse
from trainhouse.client.data import as_tokens
from trainhouse.schemas import training
from trainhouse.schemas.batches import merge_outputs, num_bytes, split_into_chunks
from trainhouse.schemas.training import ForwardBackwardOutput


def datum(length: int) -> trainhouse.Datum:
    return trainhouse.Datum(range(length), {"target_tokens": range(length), "weights": [1.0] * length})


@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor])
def test_a_datum_takes_lists_arrays_and_tensors(make) -> None:
    one = trainhouse.Datum(make([1, 2, 3]), {"target_tokens": make([2, 3, 4]), "weights": make([0, 1, 1])})
    assert isinstance(one, training.Datum)
    assert (one.tokens.dtype, one.tokens.tolist()) == (np.int32, [1, 2, 3])
    dtypes = {name: array.dtype for name, array in one.loss_fn_inputs.items()}
    assert dtypes == {"target_tokens": np.int64, "weights": np.float32}


@pytest.mark.parametrize(
    ("tokens", "inputs", "words"),
    [
        ([1.9, 2], {}, "tokens has 1.9: token ids are integers"),
        ([1, None], {}, "tokens has 'None', which is not a number"),
        ([[1, 2], [3, 4]], {}, r"tokens have the shape \[2, 2\]"),
        ([[1, 2], [3]], {}, "tokens is not an array of numbers"),
        ([2**40], {}, "model_input has 1099511627776: a token id is at most 2147483647"),
        ([2**70], {}, "tokens has '1180591620717411303424', which is not a number of at most 64 bits"),
        ([1], {"weights": [1j]}, "weights has '1j', which is not a number of at most 64 bits"),
        ([float("nan")], {}, "tokens has nan"),
        ([1], {"target_tokens": [1.7]}, "target_tokens has 1.7: token ids are integers"),
        ([1], {"weights": "abc"}, "weights has 'abc', which is not a number"),
        ([1], {"weights": [1.0, None]}, "weights has 'None', which is not a number"),
        ([1], {"weights": None}, "weights is None: pass a list"),
        (None, {}, "tokens is None: pass a list"),
        ({"ids": [1]}, {}, "tokens is a dict of ids: pass a list"),
    ],
)
def test_values_that_are_no_numbers_or_tokens_are_refused(tokens, inputs, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainhouse.Datum(tokens, inputs)


def test_whole_numbers_of_any_type_are_accepted_as_tokens() -> None:
    for tokens in (
        [1.0, 2.0],
        torch.tensor([1.0, 2.0]),
        np.asarray([1, 2], np.uint8),
        [torch.tensor(1), torch.tensor(2)],
    ):
        assert trainhouse.Datum(tokens, {"target_tokens": tokens}).tokens.tolist() == [1, 2]
    assert trainhouse.Datum([], {}).tokens.shape == (0,)


def test_loss_fn_inputs_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="loss_fn_inputs is a list: pass a dict of arrays"):
        trainhouse.Datum([1], [1])  # pyright: ignore[reportArgumentType]


def test_a_prompt_is_a_model_input_or_any_sequence_of_tokens() -> None:
    prompts = [trainhouse.ModelInput.from_ints([1, 2]), [1, 2], np.asarray([1, 2])]
    assert [as_tokens(prompt) for prompt in prompts] == [[1, 2]] * 3


def test_chunks_keep_order_and_both_limits() -> None:
    data = [datum(length) for length in (4, 4, 4, 4, 4)]
    assert [len(piece) for piece in split_into_chunks(data, 2, 10**6)] == [2, 2, 1]
    assert [len(piece) for piece in split_into_chunks(data, 100, 3 * num_bytes(data[0]))] == [3, 2]
    assert [one for piece in split_into_chunks(data, 2, 10**6) for one in piece] == data


def test_a_datum_over_the_byte_limit_is_sent_alone() -> None:
    data = [datum(4), datum(400), datum(4)]
    assert [len(piece) for piece in split_into_chunks(data, 100, num_bytes(data[0]))] == [1, 1, 1]


def test_metrics_of_chunks_are_merged_by_their_reduction() -> None:
    def output(value: float, num_datums: int, **extra: float) -> ForwardBackwardOutput:
        metrics = {f"m:{reduction}": value for reduction in ("sum", "min", "max", "mean", "unheard_of")}
        return ForwardBackwardOutput(({},) * num_datums, metrics | extra)

    whole = merge_outputs([output(1, 2, lonely=1), output(2, 2), output(3, 1)])
    assert whole.metrics == {"m:sum": 6, "m:min": 1, "m:max": 3, "m:mean": 1.8}
    assert len(whole.loss_fn_outputs) == 5


def test_the_mean_over_chunks_is_the_ratio_of_their_sums() -> None:
    def output(numerator: float, denominator: float) -> ForwardBackwardOutput:
        metrics = {"r:sum": numerator, "r/of:sum": denominator, "r:mean": numerator / max(denominator, 1)}
        return ForwardBackwardOutput(({},), metrics)

    assert merge_outputs([output(6, 2), output(1, 1), output(0, 0)]).metrics == {
        "r:sum": 7,
        "r/of:sum": 3,
        "r:mean": 7 / 3,
    }
    assert merge_outputs([output(0, 0), output(0, 0)]).metrics["r:mean"] == 0
