"""Answers to OpenAI clients: time and memory grow with their content, which is built only once."""

import asyncio
import json
import pickle
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from trainhouse.schemas.chats.openai import CompletionRequest, OpenAiError
from trainhouse.schemas.sampling import Constraint, SampledSequence, SampleResponse, SamplingParams, TopkLogprobs
from trainhouse.server.openai import translation
from trainhouse.server.openai.choices import RequestChoices
from trainhouse.server.openai.completions import CompletionResponseWriter
from trainhouse.server.openai.prompts import Prompt
from trainhouse.server.openai.response_writer import PromptOutput
from trainhouse.server.openai.routes import _pieces
from trainhouse.server.openai.sample_batch import JobProgress, JobResult
from trainhouse.server.openai.translation import sample_requests
from trainhouse.server.sampling.sampling_job import Stops
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts
from trainhouse.workers.protocol.calls import SampledPart

from ...letters import VOCAB, letter_tokenizer

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerFacts(letter_tokenizer().backend_tokenizer.to_str(), {}, {}))


def tokens(length: int) -> np.ndarray:
    return RANDOM.integers(4, VOCAB, length).astype(np.int32)


def logprobs(*shape: int) -> np.ndarray:
    return -RANDOM.random(shape).astype(np.float32)


def tops(length: int, k: int) -> TopkLogprobs:
    return TopkLogprobs(np.tile(np.arange(4, 4 + k, dtype=np.int32), (length, 1)), logprobs(length, k))


def test_an_echo_is_built_once_for_all_its_choices(tokenizer: Tokenizer) -> None:
    length, n, k = 1000, 24, 20
    prompt = Prompt(tokens(length).tolist())
    asked = CompletionRequest(model="m", prompt=list(prompt.token_ids), n=n, max_tokens=1, echo=True, logprobs=k)
    choices, answer = (
        RequestChoices(asked, tokenizer, Stops(()), [prompt]),
        CompletionResponseWriter(asked, tokenizer, [prompt]),
    )
    sequence = SampledSequence("length", tokens(1), logprobs(1), tops(1, k))
    drawn = JobResult(0, SampleResponse((sequence,) * n, logprobs(length), tops(length, k)))
    tracemalloc.start()
    body = answer.encode([PromptOutput(choices.echo(0, drawn.response), choices.finish(drawn))], choices.usage())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    decoded = json.loads(body)["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in decoded] == [length + 1] * n
    assert len({choice["text"][:-10] for choice in decoded}) == 1
    assert peak < 3.5 * len(body), "the JSON and its pieces, not every choice as objects"


async def ticks(during: "asyncio.Task[list[bytes]]") -> int:
    count = 0
    while not during.done():
        await asyncio.sleep(0)
        count += 1
    return count


@pytest.mark.anyio
async def test_other_tasks_run_while_many_samples_are_encoded(tokenizer: Tokenizer) -> None:
    n, length, k = 500, 4, 5
    asked = CompletionRequest(model="m", prompt="x", n=n, stream=True, logprobs=k)
    prompt = Prompt([5])
    choices, answer = (
        RequestChoices(asked, tokenizer, Stops(()), [prompt]),
        CompletionResponseWriter(asked, tokenizer, [prompt]),
    )
    parts = tuple(SampledPart(sample, tokens(length), logprobs(length), tops(length, k)) for sample in range(n))

    async def encode() -> list[bytes]:
        return [piece async for piece in _pieces(answer, choices.grow(JobProgress(0, parts)))]

    encoding = asyncio.create_task(encode())
    num_ticks = await ticks(encoding)
    pieces = await encoding
    events = b"".join(pieces).decode().split("\n\n")[:-1]
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["index"] for event in events] == list(range(n))
    assert num_ticks >= len(pieces) > 10


def params_of_many_prompts(**fields: object) -> Iterator[object]:
    asked = CompletionRequest.model_validate({"model": "m", "prompt": [[5]] * 3} | fields)
    for request in sample_requests(asked, [Prompt([5]), Prompt([6, 7]), Prompt([8])], context=10):
        yield request.sampling_params


def test_many_prompts_share_their_sampling_parameters() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    params = list(params_of_many_prompts(logit_bias={str(token): 1 for token in range(1000)}, response_format=schema))
    assert len({id(one.logit_bias) for one in params}) == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert len({id(one.constraint) for one in params}) == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.max_tokens for one in params] == [9, 8, 9]  # pyright: ignore[reportAttributeAccessIssue]


def test_tokens_that_a_rank_reads_for_each_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "MAX_REPEATED_TOKENS", 299)
    assert len(list(params_of_many_prompts(logit_bias={str(token): 1 for token in range(99)}))) == 3
    assert len(list(params_of_many_prompts(stop_token_ids=list(range(99))))) == 3
    for param, tokens in (("logit_bias", {str(token): 1 for token in range(100)}), ("stop_token_ids", [7] * 100)):
        with pytest.raises(OpenAiError, match=rf"^{param} of 100 tokens for 3 prompts makes 300; ") as refused:
            list(params_of_many_prompts(**{param: tokens}))
        assert refused.value.param == param


def test_the_digest_of_a_constraint_is_computed_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(constraint=Constraint(regex="a"))
    assert params.constraint is not None
    digest = params.constraint.digest
    assert digest != Constraint(regex="b").digest
    monkeypatch.delattr(Constraint, "digest")
    for sent in (params.model_copy(update={"seed": 1}), pickle.loads(pickle.dumps(params))):
        assert sent.constraint is not None and vars(sent.constraint)["digest"] == digest
