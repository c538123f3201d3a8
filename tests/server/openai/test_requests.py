"""OpenAI requests: bounds are those of the samplers, and invalid requests cost no more than valid ones."""

import json
import tracemalloc
from typing import Any

import pytest
from trainhouse.schemas.chats.openai import ChatCompletionRequest, CompletionRequest, OpenAiError, decoder
from trainhouse.schemas.sampling import SamplingParams

MANY = 50_000
PROMPT = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def decode(fields: dict[str, Any]) -> CompletionRequest | ChatCompletionRequest:
    return decoder(ChatCompletionRequest if "messages" in fields else CompletionRequest)(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (PROMPT | {"prompt": [1.5] * MANY}, "prompt"),
        (PROMPT | {"prompt": [[1, "x"]] * MANY}, "prompt"),
        (PROMPT | {"prompt": [*["x"] * MANY, 5]}, "prompt"),
        (PROMPT | {"stop": [5] * MANY}, "stop"),
        (PROMPT | {"stop_token_ids": ["x"] * MANY}, "stop_token_ids.0"),
        (PROMPT | {"logit_bias": {f"x{index}": 1 for index in range(MANY)}}, "logit_bias.x0"),
        (PROMPT | {f"x{index}": 1 for index in range(MANY)}, "x0"),
        (PROMPT | {"stream_options": {f"x{index}": 1 for index in range(MANY)}}, "stream_options.x0"),
        (PROMPT | {"response_format": {f"x{index}": 1 for index in range(MANY)}}, "response_format.x0"),
        (CHAT | {"messages": [{"content": "x"}] * MANY}, "messages.0.role"),
        (CHAT | {"messages": [{"role": "user", "content": [5] * MANY}]}, "messages.0.content"),
        (CHAT | {"messages": [{"role": "user", "tool_calls": [5] * MANY}]}, "messages.0.tool_calls.0"),
    ],
)
def test_only_the_first_of_many_errors_is_reported(wrong: dict[str, Any], param: str) -> None:
    tracemalloc.start()
    with pytest.raises(OpenAiError) as refused:
        decode(wrong)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (refused.value.param or "").startswith(param)
    assert len(str(refused.value)) < 300
    assert peak < 400 * MANY, "each error of pydantic would take up to 2 KB"


def test_parameters_have_the_same_bounds_as_in_the_native_protocol() -> None:
    shared = set(CompletionRequest.model_fields) & set(SamplingParams.model_fields) - {"stop", "logit_bias"}
    assert {"temperature", "repetition_penalty", "presence_penalty", "min_p", "top_p", "top_k"} < shared
    for value in (-1e31, -1e7, -1, -1e-4, 0, 1e-4, 0.5, 1, 2, 5000, 1e7, 1e31):
        for name in shared - {"max_tokens"}:
            taken = is_accepted(lambda given: decode(PROMPT | given), {name: value})
            vllms_off = name == "top_k" and value == 0
            assert vllms_off or taken <= is_accepted(SamplingParams.model_validate, {name: value}), f"{name} {value}"
        biases = {"logit_bias": {"5": value}}
        assert is_accepted(lambda given: decode(PROMPT | given), biases) == is_accepted(
            SamplingParams.model_validate, biases
        )


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (CHAT | {"temprature": 0.1}, "temprature is not supported here (it was 0.1): did you mean temperature?"),
        (CHAT | {"nonsense": 1}, "nonsense is not supported here (it was 1): leave it out"),
        (
            CHAT | {"response_format": {"type": "json_schema", "schema": {}}},
            'response_format.schema is not supported here (it was {}): write it into "json_schema": {"schema": ...}',
        ),
        (CHAT | {"messages": []}, "messages is []: it should have at least 1 item, not 0"),
        (PROMPT | {"stop": 5}, "stop is 5: it should be a string or up to 16 strings, of 1 to 1000 characters each"),
        (
            PROMPT | {"prompt": [1, 1.5]},
            "prompt is [1, 1.5]: it should be a text, token ids, or a list of texts or of lists of token ids; element "
            "1 is 1.5",
        ),
    ],
)
def test_errors_name_the_value_and_the_remedy(sent: dict[str, Any], words: str) -> None:
    with pytest.raises(OpenAiError) as refused:
        decode(sent)
    assert refused.value.message == words


def is_accepted(validate: Any, given: dict[str, Any]) -> bool:
    try:
        validate(given)
    except (OpenAiError, ValueError):
        return False
    return True


def test_the_length_of_stop_strings_is_bounded_in_both_protocols() -> None:
    for length, taken in ((1000, True), (1001, False)):
        for stop in ("a" * length, ["x", "a" * length]):
            assert is_accepted(SamplingParams.model_validate, {"stop": stop}) == taken
            assert is_accepted(lambda given: decode(PROMPT | given), {"stop": stop}) == taken
    assert not is_accepted(SamplingParams.model_validate, {"stop": ["x"] * 65})


@pytest.mark.parametrize(
    "options", [{"include_usage": True, "include_obfuscation": False}, {"include_usage": None}, None]
)
def test_stream_options_without_effect_are_accepted(options: dict[str, Any] | None) -> None:
    assert decode(PROMPT | {"stream": True, "stream_options": options}).stream
