"""Jobs of journaled requests mean what they meant to the version that accepted them."""

from dataclasses import replace
from typing import Any

import pytest
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.schemas.sampling import ModelInput, SampleRequest, SamplingParams
from trainhouse.server.journal.journal import SAMPLING_RULES, Header
from trainhouse.server.sampling.sampler import Sampler
from trainhouse.server.sampling.sampling_job import SamplingJob
from trainhouse.server.store import SamplerRecord

from ..api import MODEL, MODEL_INFO

VOCAB = 10_000_000
LARGE = replace(MODEL_INFO, vocab_size=VOCAB)
SAMPLER = Sampler(SamplerRecord("s:sample:0", "s", "alice", MODEL, 0.0, "base"), None)
JSON = {"type": "object"}
FLEXIBLE = {"whitespace_flexible": True}


@pytest.mark.parametrize(
    ("given", "earlier"),
    [
        (JSON, JSON | {"x-guidance": FLEXIBLE}),
        (
            JSON | {"x-guidance": {"key_separator": ": "}},
            JSON | {"x-guidance": FLEXIBLE | {"key_separator": ": "}},
        ),
        (JSON | {"x-guidance": {"whitespace_flexible": False}}, JSON | {"x-guidance": {"whitespace_flexible": False}}),
        (JSON | {"x-guidance": "refused"}, JSON | {"x-guidance": "refused"}),
    ],
)
def test_json_of_earlier_versions_may_contain_white_space(given: dict, earlier: dict) -> None:
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"stop": "x"}}
    body["sampling_params"]["constraint"] = {"json_schema": given}
    request = SampleRequest.model_validate(body)

    def job(**fields: int) -> SamplingJob:
        header = Header("sample", "alice", "s:sample:0", 1, "s:sample:0:1", drawn={"seed": 7}, **fields)  # pyright: ignore[reportArgumentType]
        return SamplingJob.resumed(request, header, SAMPLER, MODEL_INFO)

    for each, schema, ends in ((job(), earlier, ()), (job(sampling_rules=SAMPLING_RULES), given, (2,))):
        sent = each.for_worker()
        assert sent.params.constraint is not None and sent.params.constraint.json_schema == schema
        assert (sent.stop_token_ids, sent.stop_strings, sent.params.seed) == (ends, ("x",), 7)
        assert sent.params.temperature == request.sampling_params.temperature


def test_a_prompt_beyond_the_context_is_refused_before_its_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    long = list(range(MODEL_INFO.max_context_length))
    request = SampleRequest.model_validate(
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": part} for part in (long[:2], long[2:])]}}
    )
    with monkeypatch.context() as patch:
        patch.delattr(ModelInput, "to_ints")
        with pytest.raises(RequestError, match=rf"^the prompt has {len(long)} tokens, but .*: shorten the prompt$"):
            SamplingJob(request, "s:sample:0:1", SAMPLER, MODEL_INFO)
    request.prompt.chunks.pop()
    assert SamplingJob(request, "s:sample:0:1", SAMPLER, MODEL_INFO).prompt.tolist() == [0, 1]


def sampling_job(num_prompt: int, **fields: Any) -> SamplingJob:
    params = {name: fields.pop(name) for name in SamplingParams.model_fields if name in fields}
    body = {"prompt": ModelInput.from_ints(range(num_prompt)), "sampling_params": SamplingParams(**params)}
    return SamplingJob(SampleRequest(**body, **fields), "s:sample:0:1", SAMPLER, LARGE)


def test_workers_get_a_number_of_tokens_for_which_the_context_has_room() -> None:
    context = MODEL_INFO.max_context_length
    for num_prompt, given, wanted in ((4, None, context - 4), (4, 5, 5), (4, context - 4, context - 4)):
        sent = sampling_job(num_prompt, max_tokens=given, num_samples=3).for_worker()
        assert (sent.max_tokens, sent.fills_context) == (wanted, given is None)
        assert sent.most_tokens == num_prompt + 3 * wanted
    assert sampling_job(context - 1).for_worker().max_tokens == 1
    with pytest.raises(RequestError, match=r"max_tokens \d+ exceeds the"):
        sampling_job(4, max_tokens=context - 3)


def targets(token: int) -> dict[str, Any]:
    return {"dtype": "int64", "shape": [3, 1], "data": [token] * 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_tokens": 12, "topk_sample_logprobs": 2_000_000},
            "topk_sample_logprobs 2000000 at 12 sampled tokens",
        ),
        (
            {"topk_prompt_logprobs": 5_000_000},
            "topk_prompt_logprobs 5000000 at 4 prompt tokens",
        ),
        ({"prompt_alt_tokens_k": 5_000_000}, "prompt_alt_tokens_k 5000000 at 4 prompt tokens makes more than 16777216"),
        ({"stop": ["x", ""]}, "a stop string is empty"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n 2 needs prompt_logprobs and must be between 1 and len"),
        ({"target_prompt_logprobs": targets(VOCAB)}, f"target_prompt_logprobs holds token id {VOCAB}, outside the"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds token id {VOCAB}, outside the model's vocabulary of {VOCAB}"),
    ],
)
def test_what_is_refused_after_it_was_accepted(fields: dict[str, Any], message: str) -> None:
    job = sampling_job(4, **fields)
    with pytest.raises(OperationError, match=message) as refused:
        job.for_worker()
    assert refused.value.category == "user"


def test_less_is_sent() -> None:
    tokens = {"target_prompt_logprobs": targets(VOCAB - 1), "logit_bias": {VOCAB - 1: 1.0}}
    job = sampling_job(4, stop=["x"], prompt_logprobs=True, prompt_logprobs_last_n=2, topk_sample_logprobs=2, **tokens)
    assert job.for_worker().target_prompt_tokens is not None
