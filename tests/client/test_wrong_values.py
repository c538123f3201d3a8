"""What a request does not take is refused by our client, in words."""

from collections.abc import Callable

import pytest
from pydantic import ValidationError
from trainhouse.client.wrong_values import refused_in_words
from trainhouse.schemas.drafts import BuildVocabMapRequest, CaptureRequest
from trainhouse.schemas.models import LoraConfig, NewDraft
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import OptimStepRequest, Wire

CAPTURE = {"model_id": "a", "data": [{"model_input": [1]}]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: NewDraft.model_validate({"algorithm": "eagle"}),
            "algorithm is 'eagle': it should be 'eagle3' or 'dflash'",
        ),
        (
            lambda: CaptureRequest.model_validate(CAPTURE | {"uses": 0, "ttl_seconds": -1.0}),
            "ttl_seconds is -1.0: it should be greater than 0; uses is 0: it should be greater than or equal to 1",
        ),
        (
            lambda: CaptureRequest.model_validate(CAPTURE | {"data": [{"model_input": [5, -1]}]}),
            "data.0.model_input.1 is -1: it should be greater than or equal to 0",
        ),
        (
            lambda: BuildVocabMapRequest(model_id="a", tokens=[[1]], counts={1: 1}),
            "tokens and counts are both given: give either tokens or counts",
        ),
        (
            lambda: BuildVocabMapRequest(model_id="a"),
            "neither tokens nor counts are given: give either tokens or counts",
        ),
        (
            lambda: BuildVocabMapRequest(model_id="a", tokens=[[-100] * 20_000]),
            "; ".join(f"tokens.0.{i} is -100: it should be greater than or equal to 0" for i in range(5))
            + "; and 19995 more",
        ),
        (
            lambda: CaptureRequest.model_validate({"model_id": 5, "data": [{"model_input": [5, -1]}]}),
            "model_id is 5: it should be a valid string; data.0.model_input.1 is -1: it should be greater than",
        ),
        (
            lambda: OptimStepRequest.model_validate({"model_id": "a", "gradient_scale": "means"}),
            "gradient_scale is 'means': it should be",
        ),
        (lambda: LoraConfig(rank=0), "rank is 0: it should be greater than or equal to 1"),
        (
            lambda: SamplingParams.model_validate({"max_tokens": "many"}),
            "max_tokens is 'many': it should be a valid integer",
        ),
    ],
)
def test_a_value_is_named_with_what_may_be_there(make: Callable[[], Wire], words: str) -> None:
    with pytest.raises(ValueError) as refused, refused_in_words():
        make()
    assert not isinstance(refused.value, ValidationError)
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)
