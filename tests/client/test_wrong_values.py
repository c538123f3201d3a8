"""Our client refuses invalid request values with readable errors."""

import json
from collections.abc import Callable

import pytest
import trainhouse
from pydantic import ValidationError
from trainhouse.schemas.codec import decode_model
from trainhouse.schemas.drafts import BuildVocabMapRequest, CaptureRequest
from trainhouse.schemas.errors import RequestError, readable_validation_errors
from trainhouse.schemas.models import LoraConfig, NewDraft
from trainhouse.schemas.sampling import SampleRequest, SamplingParams
from trainhouse.schemas.training import AdamParams, OptimStepRequest, Wire

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
            "tokens.0.0 is -100: it should be greater than or equal to 0",
        ),
        (
            lambda: BuildVocabMapRequest(model_id="a", counts=dict.fromkeys(range(200), -1)),
            "; ".join(f"counts.{i} is -1: it should be greater than or equal to 0" for i in range(5))
            + "; and 195 more",
        ),
        (
            lambda: CaptureRequest.model_validate({"model_id": 5, "data": [{"model_input": [5, -1]}]}),
            "model_id is 5: it should be a valid string; data.0.model_input.1 is -1: it should be greater than",
        ),
        (
            lambda: OptimStepRequest.model_validate({"model_id": "a", "gradient_scale": "means"}),
            "gradient_scale is 'means': it should be a number or \"mean\"",
        ),
        (lambda: LoraConfig(rank=0), "rank is 0: it should be greater than or equal to 1"),
        (
            lambda: SamplingParams.model_validate({"max_tokens": "many"}),
            "max_tokens is 'many': it should be a valid integer",
        ),
        (lambda: NewDraft.model_validate({"algorithm": "eagle3", "layers": 2}), "NewDraft has no layers: did you mean"),
        (
            lambda: OptimStepRequest.model_validate({"model_id": "a", "adam_params": {"lr": 1}}),
            "AdamParams has no lr: did you mean learning_rate?",
        ),
    ],
)
def test_an_error_names_the_value_and_what_is_expected(make: Callable[[], Wire], words: str) -> None:
    with pytest.raises(ValueError) as refused, readable_validation_errors():
        make()
    assert not isinstance(refused.value, ValidationError)
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


STOP = "it should be a string or up to 64 strings, of at most 1000 characters each, or token ids"


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (5, f"stop is 5: {STOP}"),
        (["a"] * 65, f"stop is ['a', 'a', 'a', 'a', 'a', 'a', ...]: {STOP}"),
        (["a", 5], f"stop is ['a', 5]: {STOP}; element 1 is 5"),
        ([5, "a"], f"stop is [5, 'a']: {STOP}; element 1 is 'a'"),
        ([None], f"stop is [None]: {STOP}; element 0 is None"),
    ],
)
def test_a_field_of_several_types_is_refused_in_one_sentence(stop: object, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(stop=stop)  # pyright: ignore[reportArgumentType]
    assert str(refused.value) == words
    with pytest.raises(RequestError) as answered:
        decode_model(SampleRequest, json.dumps({"prompt": {"chunks": []}, "sampling_params": {"stop": stop}}).encode())
    assert answered.value.message.startswith("bad request: sampling_params.stop is ")
    assert answered.value.message.endswith(words.split(": ", 1)[1]) and "valid" not in answered.value.message


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (AdamParams, "lr", "did you mean learning_rate?"),
        (AdamParams, "learning_rat", "did you mean learning_rate?"),
        (AdamParams, "betas", "did you mean beta1 and beta2?"),
        (AdamParams, "max_grad_norm", "did you mean grad_clip_norm?"),
        (AdamParams, "amsgrad", "it has learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm"),
        (SamplingParams, "temp", "did you mean temperature?"),
        (SamplingParams, "max_new_tokens", "did you mean max_tokens?"),
        (SamplingParams, "topp", "did you mean top_p?"),
    ],
)
def test_an_unknown_field_gets_a_suggestion(
    kind: type[AdamParams] | type[SamplingParams], name: str, meant: str
) -> None:
    with pytest.raises(ValueError) as refused:
        kind(**{name: 1})
    assert f"{kind.__name__} has no {name}: {meant}" in str(refused.value)
    assert "http" not in str(refused.value), "the message has no link"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdamParams(learning_rate=-1.0), "learning_rate is -1.0: it should be greater than or equal to 0"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens is 0: it should be greater than or equal to 1"),
        (lambda: trainhouse.CheckpointSchedule(every=0), "every is 0: it should be greater"),
        (lambda: trainhouse.CheckpointSchedule(every=10, keep_best=2), "keep_best needs a metric"),
        (lambda: trainhouse.ModelInput(chunks=3), "chunks is 3: it should be a valid"),  # pyright: ignore
    ],
)
def test_what_users_construct_is_refused_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


def test_fields_without_a_name_are_refused_with_one() -> None:
    with pytest.raises(TypeError, match=r"takes its fields by name: write AdamParams\(learning_rate=\.\.\.\)"):
        AdamParams(1e-4)  # pyright: ignore[reportCallIssue]


def test_every_suggestion_names_an_existing_field() -> None:
    for kind in (AdamParams, SamplingParams):
        for name, field in kind.synonyms.items():
            assert name not in kind.model_fields
            assert set(field.split(" and ")) <= set(kind.model_fields) or "next to" in field
