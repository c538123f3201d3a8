"""The unmodified `openai` package against a live server: all supported requests, and refusals."""

import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..letters import SPECIAL, save_letter_tokenizer
from ..live import DEPLOYMENTS, EACH_LAYOUT, LiveServer, live_server
from ..tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

MODEL = "tiny/letters"
KEY = "tml-openai"
RETURNED = {"return_token_ids": True}
HELLO: list[Any] = [{"role": "user", "content": "Hello, what is the weather?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model("llama", tmp_path_factory.mktemp("letters"))
    save_letter_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module", params=EACH_LAYOUT)
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state"), **DEPLOYMENTS[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(server.url, KEY) as service:
        yield service


def connect(server: LiveServer, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def connect_async(server: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def native_sample(server: LiveServer, prompt: Sequence[int], **fields: Any) -> Any:
    """Samples one prompt through our own API."""
    params = {"max_tokens": 12, "seed": 5, "stop": []} | fields.pop("sampling_params", {})
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "sampling_params": params}
    headers = {"X-API-Key": KEY, "Prefer": "wait=40"}
    answer = httpx.post(
        f"{server.url}/api/v1/sample", json={"base_model": MODEL} | body | fields, headers=headers, timeout=60
    )
    return answer.raise_for_status().json()


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


# Completions


def test_completion_equals_our_own_api(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer.encode("the model is")
    native = native_sample(server, prompt)["sequences"][0]
    answer = client.completions.create(
        model=MODEL,
        prompt="the model is",
        max_tokens=12,
        seed=5,
        logprobs=3,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.token_ids == native["tokens"] and choice.prompt_token_ids == prompt  # pyright: ignore[reportAttributeAccessIssue]
    assert choice.text == text_of(tokenizer, native["tokens"])
    assert choice.finish_reason == "length" and answer.object == "text_completion" and answer.model == MODEL
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(native["logprobs"], abs=1e-4)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert usage == (len(prompt), 12, len(prompt) + 12)
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) <= len(prompt)


def test_logprobs_contain_likeliest_and_sampled_tokens_with_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the model is", max_tokens=30, seed=5, logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    top, offsets = choice.logprobs.top_logprobs or [], choice.logprobs.text_offset or []
    tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert len(top) == len(offsets) == len(tokens) == len(logprobs)
    for token, logprob, likeliest in zip(tokens, logprobs, top, strict=True):
        assert 3 <= len(likeliest) <= 4 and likeliest[token] == logprob
        assert logprob <= max(likeliest.values())
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<")):
            assert choice.text[offset:].startswith(token)
    only_sampled = client.completions.create(model=MODEL, prompt="the", max_tokens=2, seed=5, logprobs=0).choices[0]
    assert only_sampled.logprobs is not None and [len(one) for one in only_sampled.logprobs.top_logprobs or []] == [
        1,
        1,
    ]


def test_echo_scores_the_prompt_like_our_own_api(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "the model of 😀 is here"
    prompt = tokenizer.encode(text)
    native = native_sample(server, prompt, prompt_logprobs=True)
    for max_tokens in (0, 3):
        answer = client.completions.create(
            model=MODEL,
            prompt=text,
            max_tokens=max_tokens,
            seed=5,
            echo=True,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        (choice,) = answer.choices
        assert choice.text.startswith(text) and (max_tokens or choice.text == text)
        assert choice.logprobs is not None and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
        scored = choice.logprobs.token_logprobs
        assert len(scored) == len(prompt) + max_tokens and scored[0] is None and choice.logprobs.top_logprobs[0] is None
        expected = [*native["prompt_logprobs"][1:], *native["sequences"][0]["logprobs"][:max_tokens]]
        assert scored[1:] == pytest.approx(expected, abs=1e-4)
        assert choice.logprobs.text_offset and choice.logprobs.text_offset[:2] == [0, len(tokenizer.decode(prompt[:1]))]
        assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    streamed = client.completions.create(model=MODEL, prompt=text, max_tokens=3, seed=5, echo=True, stream=True)
    whole = client.completions.create(model=MODEL, prompt=text, max_tokens=3, seed=5, echo=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_echo_stream_without_sampling_has_only_the_prompts(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": ["the model", "is here"], "n": 2, "max_tokens": 0, "echo": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    *chunks, last = client.completions.create(**fields)
    parts = [part for chunk in chunks for part in chunk.choices]
    texts = ["".join(part.text for part in parts if part.index == index) for index in range(4)]
    assert texts == ["the model", "the model", "is here", "is here"]
    assert not any(part.token_ids for part in parts)  # pyright: ignore[reportAttributeAccessIssue]
    assert last.usage is not None and last.usage.completion_tokens == 0


def test_completion_without_max_tokens_ends_with_the_context(client: openai.OpenAI) -> None:
    for length, num_sampled in ((1000, 16), (1020, 4)):
        answer = client.completions.create(
            model=MODEL, prompt=[5] * length, extra_body={"ignore_eos": True, "return_token_ids": True}
        )
        assert answer.usage is not None and answer.usage.completion_tokens == num_sampled


def test_several_prompts_of_every_form_have_n_choices_each(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["the model", "a number of them"]
    tokens = [tokenizer.encode(text) for text in texts]
    answers = [
        client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=6, seed=1) for prompt in (texts, tokens)
    ]
    for answer in answers:
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, tokens))
    assert [one.text for one in answers[0].choices] == [one.text for one in answers[1].choices]
    single = [
        client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=6, seed=1).choices
        for prompt in (texts[1], tokens[1])
    ]
    for choices in single:
        assert [one.text for one in choices] == [one.text for one in answers[0].choices[2:]]


def test_stop_strings_are_not_in_the_text(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="the", max_tokens=40, seed=9).choices[0].text
    checked = 0
    for start in range(4, len(free) - 3):
        stop = free[start : start + 3]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        checked += 1
        stops = ["never so", stop]
        whole = client.completions.create(model=MODEL, prompt="the", max_tokens=40, seed=9, stop=stops).choices[0]
        assert (whole.text, whole.finish_reason) == (free[: free.index(stop)], "stop")
        chunks = list(
            client.completions.create(model=MODEL, prompt="the", max_tokens=40, seed=9, stop=stops, stream=True)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
        if checked == 6:
            return
    pytest.fail("the sample has no text to stop at: take another seed")


def test_stop_token_ends_the_text_and_is_not_in_it(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    free = native_sample(server, tokenizer.encode("the"), sampling_params={"max_tokens": 40})["sequences"][0]["tokens"]
    end = free[7]
    cut = free.index(end)
    for strings in ([], ["never so"]):
        answer = client.completions.create(
            model=MODEL, prompt="the", max_tokens=40, seed=5, stop=strings, extra_body={"stop_token_ids": [end]}
        )
        assert answer.choices[0].text == text_of(tokenizer, free[:cut])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == cut + 1


@pytest.mark.parametrize("stop", [None, [], "never so", ["never so", "nor so"]])
def test_the_end_token_ends_samples_whatever_the_stops(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast, stop: Any
) -> None:
    bias = {str(tokenizer.eos_token_id): 5.0}
    params = {"max_tokens": 40, "logit_bias": bias}
    free = native_sample(server, tokenizer.encode("the"), sampling_params=params)["sequences"][0]["tokens"]
    end = free.index(tokenizer.eos_token_id)
    assert 0 < end < 39
    answer = client.completions.create(
        model=MODEL, prompt="the", max_tokens=40, seed=5, stop=stop, logit_bias=bias, extra_body=RETURNED
    )
    assert answer.choices[0].token_ids == free[: end + 1]  # pyright: ignore[reportAttributeAccessIssue]
    native = native_sample(server, tokenizer.encode("the"), sampling_params=params | {"stop": stop})["sequences"][0]
    assert native["tokens"] == (free if stop == [] else free[: end + 1])


def test_sampling_parameters_work_as_in_our_own_api(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    fields: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.5, "top_p": 0.4}, {"top_k": 2}, {"top_k": -1}]
    fields += [{"min_p": 0.5}, {"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
    fields += [{"logit_bias": {"97": 100.0}}]
    for params in fields:
        native = native_sample(server, tokenizer.encode("the"), sampling_params=params)["sequences"][0]["tokens"]
        body = {"ignore_eos": True, "return_token_ids": True} | params
        answer = client.completions.create(model=MODEL, prompt="the", max_tokens=12, seed=5, extra_body=body)
        assert answer.choices[0].token_ids == native  # pyright: ignore[reportAttributeAccessIssue]


def test_min_tokens_override_stop_strings(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 40, "seed": 9}
    fields["extra_body"] = {"min_tokens": 30}
    free = client.completions.create(**fields).choices[0].text
    answer = client.completions.create(**fields, stop=free[0])
    assert answer.usage is not None and answer.usage.completion_tokens >= 30
    assert free.startswith(answer.choices[0].text) and len(answer.choices[0].text) > 10


# Chats


def test_chat_uses_the_template_and_returns_its_answer(
    server: LiveServer, client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "X"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    rendered = [dict(message) for message in messages]
    rendered[0]["content"] = "Be\nbrief."
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "X"}}}
    rendered[2]["tool_calls"] = [call]
    for tools, choice, variables in (([TOOL], "auto", {"brief": True}), ([TOOL], "none", {}), ([], "auto", {})):
        prompt = tokenizer.apply_chat_template(
            rendered,
            tools=tools if tools and choice == "auto" else None,
            add_generation_prompt=True,
            return_dict=False,
            **variables,
        )
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools or openai.omit,
            tool_choice=choice,  # pyright: ignore[reportArgumentType]
            max_completion_tokens=12,
            seed=5,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True, "ignore_eos": True, "chat_template_kwargs": variables},
        )
        assert answer.prompt_token_ids == prompt  # pyright: ignore[reportAttributeAccessIssue]
        native = native_sample(server, prompt)["sequences"][0]
        check_answer(answer, native, text_of(tokenizer, native["tokens"]))


def check_answer(answer: ChatCompletion, native: Any, text: str) -> None:
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and choice.message.role == "assistant"
    assert choice.message.content == text and choice.token_ids == native["tokens"]  # pyright: ignore[reportAttributeAccessIssue]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(native["logprobs"], abs=1e-4)
    named = [bytes(one.bytes or []) for one in choice.logprobs.content]
    special = [name.encode() for name in SPECIAL]
    assert b"".join(one for one in named if one not in special).decode(errors="replace") == text
    for one in choice.logprobs.content:
        first, second = one.top_logprobs
        assert first.logprob >= second.logprob and first.logprob >= one.logprob - 1e-4


def test_chat_without_max_tokens_ends_with_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, seed=2, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(3))
def test_answer_conforms_to_its_schema(client: openai.OpenAI, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"sea": {"enum": ["calm", "rough"]}, "wet": {"type": "boolean"}},
        "required": ["sea", "wet"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        seed=seed,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "sea", "schema": schema, "strict": True}},
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert content["sea"] in ("calm", "rough") and isinstance(content["wet"], bool)
    assert answer.choices[0].finish_reason == "stop"


# Streams


@pytest.mark.parametrize("seed", range(3))
def test_streamed_chat_equals_the_whole_answer(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 3, "seed": seed, "max_tokens": 120}
    fields |= {"logprobs": True, "top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks[:-1])
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = [one for part in parts for one in (part.logprobs.content if part.logprobs else None) or []]
        assert [(one.token, one.logprob) for one in streamed] == [
            (one.token, pytest.approx(one.logprob, abs=1e-5)) for one in choice.logprobs.content or []
        ]
        assert [token for part in parts for token in part.token_ids] == choice.token_ids  # pyright: ignore[reportAttributeAccessIssue]


def test_stream_arrives_during_sampling(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "the", "n": 16, "max_tokens": 900, "seed": 1}
    started = time.monotonic()
    times = [time.monotonic() - started for _ in client.completions.create(**fields, stream=True, timeout=60)]
    assert len(times) > 50 and times[0] < times[-1] / 3


async def test_async_client_streams_concurrently_and_seeds_repeat(server: LiveServer) -> None:
    async with connect_async(server) as client:

        async def streamed(seed: int) -> str:
            fields = client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=seed, max_tokens=60, stream=True, temperature=0.9
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in await fields])

        async def whole(seed: int) -> str:
            answer = await client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=seed, max_tokens=60, temperature=0.9
            )
            return answer.choices[0].message.content or ""

        together = await asyncio.gather(*(fields(seed) for seed in range(6) for fields in (streamed, whole)))
        alone = [await whole(seed) for seed in range(6)]
    assert together[::2] == together[1::2] == alone
    assert len(set(alone)) == 6


async def test_without_a_seed_answers_differ(server: LiveServer) -> None:
    async with connect_async(server) as client:
        fields = [client.completions.create(model=MODEL, prompt="the", max_tokens=20) for _ in range(4)]
        assert len({answer.choices[0].text for answer in await asyncio.gather(*fields)}) == 4


# Models


def test_checkpoints_and_samplers_are_models_of_their_tenant(
    server: LiveServer, client: openai.OpenAI, service: ServiceClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    training = service.create_lora_training_client(MODEL, rank=8)
    tokens = tokenizer.encode("the house that trains models stands by the sea")
    data = [Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})]
    for _ in range(20):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
    path = training.save_weights_for_sampler("sea").result().path
    assert path is not None
    sampler = training.save_weights_and_get_sampling_client()
    native = sampler.sample(tokens[:3], 1, SamplingParams(max_tokens=10, temperature=0.0)).result().sequences[0]
    fields: dict[str, Any] = {"prompt": tokens[:3], "max_tokens": 10, "temperature": 0, "logprobs": 1}
    trained = client.completions.create(model=path, **fields).choices[0]
    assert trained.text == text_of(tokenizer, list(native.tokens)) == tokenizer.decode(tokens[3:13])
    assert trained.logprobs is not None
    assert trained.logprobs.token_logprobs == pytest.approx(list(native.logprobs), abs=1e-3)
    base = client.completions.create(model=MODEL, **fields).choices[0]
    assert base.text != trained.text
    live = client.completions.create(model=sampler.sampler_id, **fields).choices[0]
    assert live.text == trained.text
    check_models(server, client, [path, sampler.sampler_id])


def check_models(server: LiveServer, client: openai.OpenAI, names: Sequence[str]) -> None:
    assert {MODEL, names[0]} <= {one.id for one in client.models.list()}
    for name in (MODEL, *names):
        found = client.models.retrieve(name)
        assert found.id == name and found.created > 1e9
        assert (found.parent, found.max_model_len) == (None if name == MODEL else MODEL, 1024)  # pyright: ignore[reportAttributeAccessIssue]
    with connect(server, "tml-somebody-else") as other:
        assert [one.id for one in other.models.list()] == [MODEL]
        for name in names:
            with pytest.raises(openai.NotFoundError):
                other.models.retrieve(name)
            with pytest.raises(openai.NotFoundError) as refused:
                other.completions.create(model=name, prompt="the")
            assert refused.value.code == "model_not_found" and refused.value.param == "model"


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the"),
        ({"min_p": 2}, "min_p"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "the end"}, "suffix"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e31}, "temperature"),
        ({"repetition_penalty": 5000}, "repetition_penalty"),
        ({"repetition_penalty": 1e-4}, "repetition_penalty"),
        ({"presence_penalty": 1e7}, "presence_penalty"),
        ({"frequency_penalty": -1e7}, "frequency_penalty"),
        ({"logit_bias": {"5": 1e7}}, "logit_bias.5"),
        ({"stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"stop": "a" * 1001}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"prompt": {}}, "prompt"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"prompt": [[5] * 1000] * 4, "n": 1000, "echo": True}, "echo"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"prompt": [[1]] * 5, "n": 1000}, "prompt"),
        ({"prompt": [5, 512]}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_bad_completion_requests_name_the_parameter(client: openai.OpenAI, fields: dict, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="the", extra_body=fields)
    assert refused.value.param == param and refused.value.type == "invalid_request_error"
    assert param is None or param in str(refused.value)
    assert client.completions.create(model=MODEL, prompt="the", max_tokens=1).choices


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "intger"}}}},
            "response_format",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "judge", "content": "x"}]}, None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]},
            "messages.0.tool_calls",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
def test_bad_chat_requests_name_the_parameter(client: openai.OpenAI, fields: dict, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=fields)
    assert refused.value.param == param


def test_fields_with_no_effect_are_accepted(client: openai.OpenAI) -> None:
    nothing = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "suffix": None}
    nothing |= {"user": "ann", "top_k": 0, "min_tokens": 0, "seed": None, "stop": None}
    assert client.completions.create(model=MODEL, prompt="the", max_tokens=1, extra_body=nothing).choices
    nothing = {"response_format": {"type": "text"}, "metadata": {"a": "b"}, "store": False, "tools": None}
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, extra_body=nothing).choices


def test_wrong_key_model_or_path_raises_the_packages_errors(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as refused, connect(server, "sk-wrong") as stranger:
        stranger.completions.create(model=MODEL, prompt="the")
    assert refused.value.code == "invalid_api_key"
    for name in ("gpt-5", "tinker://nobody/weights/x", "tinker://x"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model=name, prompt="the")
        assert missing.value.code == "model_not_found" and name in str(missing.value)
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")
    answer = httpx.post(f"{server.url}/v1/completions", content="{", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]
    keyed = httpx.get(f"{server.url}/v1/models", headers={"X-API-Key": KEY})
    assert keyed.json()["data"][0].items() >= {"id": MODEL, "object": "model", "owned_by": "trainhouse"}.items()


@pytest.mark.full
def test_request_over_a_limit_is_throttled(model: Path, tmp_path: Path) -> None:
    with live_server({MODEL: model}, tmp_path, tenant_queued_operations=1) as server, connect(server) as client:
        fields: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 900}
        stream = client.completions.create(**fields, n=1000, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**fields)
        assert float(refused.value.response.headers["retry-after"]) >= 1
        assert "tenant-queued-operations" in str(refused.value) and refused.value.code == "rate_limit_exceeded"
        stream.close()
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            try:
                client.completions.create(model=MODEL, prompt="the", max_tokens=1)
                return
            except openai.RateLimitError:
                time.sleep(0.1)
        pytest.fail("the closed stream still counts")


def test_stream_ends_with_an_error_when_its_session_ends(client: openai.OpenAI, server: LiveServer) -> None:
    with ServiceClient(server.url, KEY) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        stream = client.completions.create(model=sampler.sampler_id, prompt="the", n=64, max_tokens=900, stream=True)
        chunks = iter(stream)
        next(chunks)
        session_id = sampler.sampler_id.partition(":")[0]
        reason = {"reason": {"type": "success"}}
        httpx.post(
            f"{server.url}/api/v1/sessions/{session_id}/finish", json=reason, headers={"X-API-Key": KEY}
        ).raise_for_status()
        with pytest.raises(openai.APIError, match="cancelled"):
            list(chunks)
    with pytest.raises(openai.NotFoundError, match="ended"):
        client.completions.create(model=sampler.sampler_id, prompt="the")


def test_cached_tokens_are_reported_only_to_their_tenant(client: openai.OpenAI, server: LiveServer) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "a prompt that no one sent before " * 20, "max_tokens": 2}
    for repeated in (False, True):
        usage = client.completions.create(**fields).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == repeated
    with connect(server, "tml-somebody-else") as other:
        usage = other.completions.create(**fields).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert not usage.prompt_tokens_details.cached_tokens, "prompts of other tenants are not revealed"


def test_logprobs_are_numbers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the", max_tokens=5, logprobs=20)
    assert answer.choices[0].logprobs is not None
    for likeliest in answer.choices[0].logprobs.top_logprobs or []:
        assert all(math.isfinite(value) for value in likeliest.values())
