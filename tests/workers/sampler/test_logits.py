"""min_p, min_tokens, penalties, biases and constraints, each against what it says."""

import gc
import json
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.sampling import Constraint, SampledSequence, SamplingParams
from trainhouse.workers.sampler.native_sampler import NativeSampler
from transformers import AutoTokenizer

from ..adapted import Adapted, copy_adapter
from .test_sampler import (
    EOS,
    VOCAB,
    adapted,
    failure,
    finish,
    job,
    lettered,
    new_sampler,
    prompt,
    reference_logprobs,
    sample,
)

__all__ = ["adapted", "lettered"]

PARAMS = SamplingParams.model_fields.keys()
NUM_TOKENS = 40


def asked(name: str, adapter_id: str | None = None, length: int = 8, **options: object) -> object:
    """A job with any of our own parameters."""
    own = {key: options.pop(key) for key in set(options) & PARAMS - {"max_tokens", "seed", "temperature"}}
    made = job(name, prompt(length), adapter_id, **({"max_tokens": NUM_TOKENS} | options))
    params = SamplingParams.model_validate(made.params.model_dump(exclude_none=True) | own)
    return type(made)(**{**vars(made), "params": params})


def next_distributions(adapted: Adapted, tokens: np.ndarray, adapter_id: str | None, length: int = 8) -> Tensor:
    """log-softmax before each sampled token, of the bare model."""
    whole = np.concatenate([prompt(length), tokens])
    return reference_logprobs(adapted, whole, adapter_id)[length - 1 : -1]


def assert_raw_logprobs(adapted: Adapted, found: SampledSequence, adapter_id: str | None, length: int = 8) -> None:
    """Whatever the choice was among, log-probabilities are the model's."""
    exact = next_distributions(adapted, found.tokens, adapter_id, length)
    own = exact.gather(1, torch.from_numpy(found.tokens.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logprobs, own, atol=1e-4)


def test_only_tokens_likely_enough_are_drawn_with_min_p(adapted: Adapted) -> None:
    found = sample(new_sampler(adapted), asked("a", "one", min_p=0.3))
    ratios = _ratios(adapted, found)
    assert ratios.min() >= 0.3 - 1e-5
    assert _ratios(adapted, sample(new_sampler(adapted), asked("a", "one"))).min() < 0.1
    assert_raw_logprobs(adapted, found, "one")


def _ratios(adapted: Adapted, found: SampledSequence) -> np.ndarray:
    """How likely each token was, relative to the likeliest."""
    exact = next_distributions(adapted, found.tokens, "one").exp()
    own = exact.gather(1, torch.from_numpy(found.tokens.astype(np.int64))[:, None])[:, 0]
    return (own / exact.amax(-1)).numpy()


def test_nothing_stops_a_sample_before_min_tokens(adapted: Adapted) -> None:
    stops = tuple(range(0, VOCAB, 4))
    lengths = {}
    for least in (0, 15):
        found = finish(
            new_sampler(adapted),
            *(asked(str(i), seed=i, min_tokens=least, stop_token_ids=stops) for i in range(20)),
        )
        sequences = [each.sequences[0] for each in found.values()]
        lengths[least] = min(len(sequence.tokens) for sequence in sequences)
        assert all(not set(sequence.tokens[: least or 0].tolist()) & set(stops) for sequence in sequences)
    assert lengths == {0: 1, 15: 16}


def test_penalties_change_the_choice_as_their_formulas_say(adapted: Adapted) -> None:
    """Greedy samples against a naive loop over plain forwards."""
    settings = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.2, "logit_bias": {7: 1.5, 9: -3}},
    ]
    jobs = [asked(str(i), "one", temperature=0, max_tokens=12, **each) for i, each in enumerate(settings)]
    found = finish(new_sampler(adapted), *jobs, asked("plain", "one", temperature=0, max_tokens=12))
    plain = found["plain"].sequences[0].tokens.tolist()
    for i, each in enumerate(settings):
        tokens = found[str(i)].sequences[0].tokens.tolist()
        assert tokens == _greedy(adapted, **each)
        assert_raw_logprobs(adapted, found[str(i)].sequences[0], "one")
    assert plain == _greedy(adapted)
    assert sum(found[str(i)].sequences[0].tokens.tolist() != plain for i in range(4)) >= 2


def _greedy(
    adapted: Adapted,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> list[int]:
    """The biases and penalties work alike on logits and log-probabilities, but for the division: it needs logits."""
    tokens: list[int] = []
    for _ in range(12):
        whole = np.concatenate([prompt(8), np.array(tokens, dtype=np.int32)])
        with torch.no_grad():
            own = torch.from_numpy(whole.astype(np.int64))
            logits = adapted.logits([own], adapted.adapters.get("one"))[-1].numpy().copy()
        for token, bias in (logit_bias or {}).items():
            logits[token] += bias
        for token in set(whole.tolist()):
            logits[token] = (
                logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
            )
        for token in set(tokens):
            logits[token] -= presence_penalty + frequency_penalty * tokens.count(token)
        tokens.append(int(logits.argmax()))
    return tokens


def test_a_forbidden_token_is_never_drawn_and_a_favoured_one_always(adapted: Adapted) -> None:
    forbidden = dict.fromkeys(range(1, VOCAB, 2), -10000.0)
    assert (sample(new_sampler(adapted), asked("a", logit_bias=forbidden)).tokens % 2 == 0).all()
    assert (sample(new_sampler(adapted), asked("a", logit_bias={33: 1e4})).tokens == 33).all()
    message = failure(new_sampler(adapted), asked("a", logit_bias={VOCAB: 1.0}))
    assert f"logit_bias holds token id {VOCAB}" in message


def texts(adapted: Adapted, sampler: NativeSampler, *constraints: Constraint, **options: object) -> list[str]:
    """Of three samples for each constraint, drawn together."""
    jobs = [
        asked(str(i), constraint=each.model_dump(), num_samples=3, max_tokens=200, seed=i, **options)
        for i, each in enumerate(constraints)
    ]
    tokenizer = AutoTokenizer.from_pretrained(adapted.directory)
    found = finish(sampler, *jobs, asked("free", max_tokens=30))
    sequences = [one for i in range(len(jobs)) for one in found[str(i)].sequences]
    assert all(sequence.stop_reason == "stop" for sequence in sequences)
    return [tokenizer.decode([token for token in sequence.tokens if token != EOS]) for sequence in sequences]


def test_samples_match_their_regular_expressions(lettered: Adapted) -> None:
    patterns = [r"[a-c]{3,8}", r"(yes|no|it is [0-9]{1,3})", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"]
    found = texts(lettered, new_sampler(lettered), *(Constraint(regex=pattern) for pattern in patterns))
    for number, text in enumerate(found):
        assert re.fullmatch(patterns[number // 3], text), text
    assert len(set(found[:3])) > 1


def test_samples_conform_to_a_json_schema_and_a_grammar(lettered: Adapted) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = 'start: sum\nsum: NUMBER "+" NUMBER ("+" NUMBER)?\nNUMBER: /[0-9]{1,2}/'
    tokenizer = AutoTokenizer.from_pretrained(lettered.directory)
    # Between the words of JSON there may be any number of them.
    blanks = {token: -1e4 for token in range(VOCAB) if tokenizer.decode([token]).isspace()}
    found = texts(
        lettered,
        new_sampler(lettered, kv_cache_bytes=1 << 20),
        Constraint(json_schema=schema),
        Constraint(grammar=grammar),
        logit_bias=blanks,
    )
    for text in found[:3]:
        value = json.loads(text)
        assert value["name"] in ("ada", "bob") and 0 <= value["age"] <= 99 and len(value) == 2
    assert all(re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,2}", text) for text in found[3:])


def test_a_constraint_survives_slices_and_preemption(lettered: Adapted) -> None:
    one = Constraint(regex=r"([a-z]{5},){20}")
    wanted = texts(lettered, new_sampler(lettered), one)
    assert texts(lettered, new_sampler(lettered, kv_cache_bytes=400 * 1024), one) == wanted


def test_constraints_that_are_not_understood_are_refused(lettered: Adapted) -> None:
    for bad in ({"regex": "("}, {"grammar": "start: nothing"}, {"json_schema": {"type": "no such type"}}):
        message = failure(new_sampler(lettered), asked("a", constraint=bad))
        assert "the constraint is invalid" in message, message


def test_a_constraint_needs_a_tokenizer_and_is_one_thing(adapted: Adapted, tmp_path: Path) -> None:
    assert "need the model's tokenizer" in failure(new_sampler(adapted), asked("a", constraint={"regex": "a"}))
    with pytest.raises(ValueError, match="exactly one of json_schema, regex and grammar, got"):
        Constraint(regex="a", grammar="b")


def test_the_largest_numbers_that_can_be_asked_for_do_no_harm(adapted: Adapted) -> None:
    jobs = [
        asked("hot", temperature=1e30),
        asked("many", top_k=2**63 - 1),
        asked("frequent", frequency_penalty=-1e6, presence_penalty=1e6),
        asked("favoured", logit_bias={3: 1e6, 4: -1e6}, repetition_penalty=1e-3),
        asked("long", min_tokens=2**63 - 1),
    ]
    found = finish(new_sampler(adapted), *jobs, asked("beside"))
    assert all(len(found[one.job_id].sequences[0].tokens) == NUM_TOKENS for one in jobs)
    beside = sample(new_sampler(adapted), asked("beside"))
    assert found["beside"].sequences[0].tokens.tolist() == beside.tokens.tolist()


def test_stop_tokens_that_do_not_exist_stop_nothing_and_harm_nobody(adapted: Adapted) -> None:
    odd = (2**63, 2**80, -1, -600, VOCAB, VOCAB + 5)
    jobs = [asked("odd", stop_token_ids=odd), asked("late", stop_token_ids=odd, min_tokens=3), asked("beside")]
    found = finish(new_sampler(adapted), *jobs)
    wanted = sample(new_sampler(adapted), asked("beside")).tokens.tolist()
    assert [found[one.job_id].sequences[0].tokens.tolist() for one in jobs] == [wanted] * 3


def test_many_stop_tokens_are_looked_up_by_their_own_job(adapted: Adapted) -> None:
    stops = tuple(range(0, VOCAB, 3))
    few, many = asked("few", stop_token_ids=stops[:20]), asked("many", stop_token_ids=stops * 50)
    sampler = new_sampler(adapted)
    found = finish(sampler, few, many)
    assert sampler._schedule.table.stops.shape[1] <= 32
    for one, own in ((few, stops[:20]), (many, stops)):
        free = sample(new_sampler(adapted), asked("free", max_tokens=NUM_TOKENS)).tokens.tolist()
        first = next((number for number, token in enumerate(free) if token in own), NUM_TOKENS - 1)
        assert found[one.job_id].sequences[0].tokens.tolist() == free[: first + 1]


def test_nothing_of_a_job_or_its_adapter_is_held_when_it_has_ended(adapted: Adapted) -> None:
    copy_adapter(adapted.adapters, "one", "leaving")
    sampler = new_sampler(adapted)
    large, small = asked("a", "leaving", topk_sample_logprobs=VOCAB), asked("b", "leaving", topk_sample_logprobs=1)
    top = finish(sampler, large, small)["b"].sequences[0].topk_logprobs
    assert top.token_ids.shape == (NUM_TOKENS, 1) and top.token_ids.base is None
    held = [weakref.ref(adapted.adapters.get("leaving")), weakref.ref(large)]
    adapted.adapters.drop("leaving")
    del large
    gc.collect()
    assert [one() for one in held] == [None, None]
