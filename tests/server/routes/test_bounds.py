"""Every field of a request has a maximum length, or is listed in PAYLOAD with the reason why it has none."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import trainhouse.schemas
from pydantic import BaseModel, TypeAdapter, ValidationError
from trainhouse.schemas import bounds
from trainhouse.schemas.checkpoints import SaveWeightsRequest
from trainhouse.schemas.codec import decode_model
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.models import CreateSessionRequest, FinishReason, FinishSessionRequest
from trainhouse.schemas.sampling import SampleRequest

from ..api import Api

pytestmark = pytest.mark.anyio

Schema = Mapping[str, Any]

PROMPT = "a prompt: bounded by the body, the model's context and the tenant's bytes"
DATA = "training data: bounded by the body and the tenant's bytes"
MESSAGES = "read by the chat template into a prompt: bounded by the body, the context and the tenant's bytes"
DROPPED = "only compared with auto and none"

PAYLOAD = {
    "SampleRequest.prompt.chunks": PROMPT,
    "SampleRequest.prompt.chunks[].tokens": PROMPT,
    "SampleRequest.target_prompt_logprobs": "a tensor: bounded by the body, and 32 MiB once dense",
    "CaptureRequest.data": DATA,
    "CaptureRequest.data[].model_input": DATA,
    "CaptureRequest.data[].model_input.chunks": DATA,
    "CaptureRequest.data[].model_input.chunks[].tokens": DATA,
    "BuildVocabMapRequest.tokens": DATA,
    "BuildVocabMapRequest.tokens[]": DATA,
    "BuildVocabMapRequest.weights": DATA,
    "BuildVocabMapRequest.weights[]": DATA,
    "BuildVocabMapRequest.counts": DATA,
    "FinishSessionRequest.detail": "cut to MAX_TEXT characters: refusing it would refuse what it explains",
    "CompletionRequest.prompt": PROMPT,
    "CompletionRequest.prompt[]": PROMPT,
    "ChatCompletionRequest.messages": MESSAGES,
    "ChatCompletionRequest.messages[]": MESSAGES,
    "ChatCompletionRequest.messages[].content": MESSAGES,
    "ChatCompletionRequest.messages[].content[].text": MESSAGES,
    "ChatCompletionRequest.messages[].tool_calls": MESSAGES,
    "ChatCompletionRequest.messages[].tool_calls[]": MESSAGES,
    "ChatCompletionRequest.messages[].tool_calls[][]": MESSAGES,
    "ChatCompletionRequest.tools": MESSAGES,
    "ChatCompletionRequest.tools[]": MESSAGES,
    "ChatCompletionRequest.tool_choice": DROPPED,
    "ChatCompletionRequest.chat_template_kwargs": MESSAGES,
    "ChatCompletionRequest.chat_template_kwargs[]": MESSAGES,
}
"""Field of a class -> why its length is not limited."""

CODEC_ROUTES = "POST /api/v1/forward_backward", "POST /api/v1/forward", "POST /api/v1/create_evaluation"
"""Routes whose bodies are decoded by the codec, not by a pydantic model: training data, and ids that must exist."""

ANSWER_MODELS = {
    *("ErrorDetail", "ErrorBody", "Model", "ModelList", "SamplerInfo", "SessionList", "SessionInfo", "Cursor"),
    *("CheckpointCopy", "Checkpoint", "TrainingRun", "TrainingRunList", "CheckpointList", "ClientConfig"),
    *("ClientDynamicConfig", "Health", "Readiness", "TokenizerFiles", "KeyOrganization", "KeyUser", "KeyDetails"),
    *("OwnKey", "SupportedModel", "ServerCapabilities", "Limit", "Limits", "FeatureStock", "Workers", "ModelData"),
    *("ArchiveUrl", "ExternalWeightsUrls", "FutureCompletion", "RequestFailed", "Pending", "RunSchedules"),
    *("MetricSeries", "RunMetrics", "RunOperation", "RunOperationList"),
}
"""Models that the server sends, in addition to the classes named ...Response."""


def request_models() -> Iterator[type[BaseModel]]:
    for module in pkgutil.walk_packages(trainhouse.schemas.__path__, "trainhouse.schemas."):
        members = vars(importlib.import_module(module.name)).values()
        models = [one for one in members if inspect.isclass(one) and issubclass(one, BaseModel)]
        ours = [one for one in models if one.__module__.startswith("trainhouse.schemas")]
        yield from (one for one in ours if not one.__name__.endswith("Response") and one.__name__ not in ANSWER_MODELS)


def unbounded(schema: Schema, place: str, definitions: Schema) -> Iterator[str]:
    """Yields the places where a string, a list or an object may have any length."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from unbounded(branch, place, definitions)
    if "enum" in schema or "const" in schema:
        return
    match schema.get("type"):
        case "string" if "maxLength" not in schema and schema.get("format") != "binary":
            yield place
        case "array":
            if "maxItems" not in schema:
                yield place
            for item in (schema.get("items", {}), *schema.get("prefixItems", ())):
                yield from unbounded(item, f"{place}[]", definitions)
        case "object":
            if schema.get("additionalProperties", "properties" not in schema) and "maxProperties" not in schema:
                yield place
            if isinstance(entries := schema.get("additionalProperties"), Mapping):
                yield from unbounded(entries, f"{place}[]", definitions)
            for name, entry in schema.get("properties", {}).items():
                yield from unbounded(entry, f"{place}.{name}", definitions)
        case None if not {"anyOf", "oneOf", "allOf"}.intersection(schema):
            yield place  # any JSON


def test_every_request_field_is_bounded_or_listed_as_payload() -> None:
    found: set[str] = set()
    for model in request_models():
        schema = model.model_json_schema()
        found |= set(unbounded(schema, model.__name__, schema.get("$defs", {})))
    # The models of parts are also found on their own.
    parts = {place for place in found if any(_is_part(place, of_request) for of_request in PAYLOAD)}
    assert sorted(found - set(PAYLOAD) - parts) == [], "bound these, or say in PAYLOAD why they need not be"
    assert sorted(set(PAYLOAD) - found) == [], "these are bounded or no longer exist: remove them from PAYLOAD"


def _is_part(place: str, of_request: str) -> bool:
    name, _, rest = place.partition(".")
    return (
        name in PARTS
        and of_request.startswith(PARTS[name])
        and of_request.removeprefix(PARTS[name]) == (f".{rest}" if rest else "")
    )


PARTS = {
    "ModelInput": "SampleRequest.prompt",
    "TokenChunk": "SampleRequest.prompt.chunks[]",
    "Captured": "CaptureRequest.data[]",
    "TextPart": "ChatCompletionRequest.messages[].content[]",
    "ChatMessage": "ChatCompletionRequest.messages[]",
}


async def test_url_and_header_parameters_are_bounded(api: Api) -> None:
    document = api.app.openapi()
    definitions = document["components"]["schemas"]
    found = [
        f"{method.upper()} {path} {parameter['in']} {parameter['name']}"
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        for parameter in route.get("parameters", ())
        if list(unbounded(parameter["schema"], "", definitions))
    ]
    assert not found
    bodies = {
        f"{method.upper()} {path}": content["schema"]
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        if (content := route.get("requestBody", {}).get("content", {}).get("application/json"))
    }
    payload = {place.partition(".")[2] for place in PAYLOAD}
    unknown = {
        f"{route} {place}"
        for route, schema in bodies.items()
        if route not in CODEC_ROUTES
        for place in unbounded(schema, "", definitions)
        if place.removeprefix(".") not in payload
    }
    assert not unknown, "a body that no model of schemas/ describes"


def test_unbounded_finds_fields_without_limits() -> None:
    class Endless(BaseModel):
        words: list[str] = []
        names: dict[str, bounds.Id] = {}
        fine: bounds.Tags = ()

    assert set(unbounded(Endless.model_json_schema(), "E", {})) == {"E.words", "E.words[]", "E.names"}


@pytest.mark.parametrize(
    ("model", "fields", "name"),
    [
        (CreateSessionRequest, {"sdk_version": "1", "display_name": "x" * 4097}, "display_name"),
        (CreateSessionRequest, {"sdk_version": "1", "tags": ["x"] * 65}, "tags"),
        (CreateSessionRequest, {"sdk_version": "1", "user_metadata": {"a": "x" * 8192}}, "user_metadata"),
        (CreateSessionRequest, {"sdk_version": "1", "user_metadata": {"a": [[1] * 5000]}}, "user_metadata"),
        (SaveWeightsRequest, {"model_id": "m", "path": "p", "user_metadata": {"k" * 9000: "v"}}, "user_metadata"),
    ],
)
def test_values_over_the_limit_are_refused_by_name(model: type[BaseModel], fields: dict, name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        TypeAdapter(model).validate_python(fields)
    shorter = {key: value for key, value in fields.items() if key != name}
    assert TypeAdapter(model).validate_python(shorter | ({name: {"a": 8000 * "x"}} if name == "user_metadata" else {}))


def test_a_long_detail_of_a_finished_session_is_cut_not_refused() -> None:
    finished = FinishSessionRequest(reason=FinishReason(type="errored"), detail="x" * 100_000)
    assert finished.detail == "x" * bounds.MAX_TEXT


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_nan_and_infinity_are_refused_in_json(number: str) -> None:
    """PostgreSQL cannot store them in JSON: the request would be answered with 500."""
    body = f'{{"sdk_version": "1", "user_metadata": {{"a": [{number}]}}}}'.encode()
    with pytest.raises(RequestError, match=r"user_metadata is .*JSON has no (nan|-?inf): leave it out"):
        decode_model(CreateSessionRequest, body)
    assert decode_model(CreateSessionRequest, body.replace(number.encode(), b"-1e99")).user_metadata == {"a": [-1e99]}


def parts_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields all parts of a pydantic core schema."""
    if isinstance(schema, Mapping):
        yield schema
    if isinstance(schema, Mapping | list | tuple):
        for part in schema.values() if isinstance(schema, Mapping) else schema:
            yield from parts_of(part)


def lists_with_many_errors(model: type[BaseModel]) -> list[str]:
    """Returns the long lists that report an error for every invalid element, not only for the first."""
    lists = [one for one in parts_of(model.__pydantic_core_schema__) if one.get("type") in ("list", "tuple", "set")]
    long = [one for one in lists if one.get("max_length", 1 << 30) > 1024 and "JsonValue" not in str(one)]
    return [str(one) for one in long if not one.get("fail_fast")]


def test_long_lists_report_only_the_first_wrong_element() -> None:
    """An error holds the interpreter for 10 microseconds: 2 million errors in a body of 4 MB took half a minute."""

    class Slow(BaseModel):
        tokens: list[int]

    assert len(lists_with_many_errors(Slow)) == 1
    assert {model.__name__: found for model in request_models() if (found := lists_with_many_errors(model))} == {}


WRONG = 50_000


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"chunks": [0] * WRONG}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"] * WRONG}]}},
        {"sampling_params": {"stop": [{}] * WRONG}},
        {"sampling_params": {"logit_bias": {f"a{number}": 0 for number in range(WRONG)}}},
        {"sampling_params": {f"a{number}": 0 for number in range(WRONG)}},
    ],
)
def test_a_body_with_many_errors_gets_a_short_message(fields: dict) -> None:
    body = {"prompt": {"chunks": []}} | fields
    with pytest.raises(ValidationError) as wrong:
        SampleRequest.model_validate(body)
    assert wrong.value.error_count() < 1000 or "sampling_params" in fields
    with pytest.raises(RequestError) as refused:
        decode_model(SampleRequest, json.dumps(body).encode())
    assert refused.value.status == 400 and len(refused.value.message) < 2000
