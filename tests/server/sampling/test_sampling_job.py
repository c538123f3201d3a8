"""Jobs of journaled requests mean what they meant to the version that accepted them."""

import pytest
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.sampling import ModelInput, SampleRequest
from trainhouse.server.journal.journal import SAMPLING_RULES, Header
from trainhouse.server.sampling.sampler import Sampler
from trainhouse.server.sampling.sampling_job import SamplingJob
from trainhouse.server.store import SamplerRecord

from ..api import MODEL, MODEL_INFO

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
