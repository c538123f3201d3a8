"""An echoed prompt is the text that was sent, even if its tokenizer prepends or strips spaces, or adds tokens."""

from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from trainhouse.schemas.chats.openai import CompletionRequest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.server.openai.choices import RequestChoices
from trainhouse.server.openai.prompts import Prompt
from trainhouse.server.sampling.sampling_job import Stops
from trainhouse.server.text.sample_text import SampleText
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts

from ...letters import letter_tokenizer

SPACES = decoders.Replace("▁", " ")
MARKS = normalizers.Replace(" ", "▁")
KINDS = {
    "prepends and strips (Llama 2)": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), MARKS]),
        "decoder": decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    },
    "only replaces (Gemma)": {"normalizer": MARKS, "decoder": decoders.Sequence([SPACES, decoders.Fuse()])},
    "prepends one (T5)": {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()},
}


def tokenizer(kind: str) -> Tokenizer:
    backend = Backend(models.BPE({piece: index for index, piece in enumerate("?▁Hi")}, [], unk_token="?"))
    for name, part in KINDS[kind].items():
        setattr(backend, name, part)
    return Tokenizer(TokenizerFacts(backend.to_str(), {}, {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hi", " Hi", "  Hi H", ""])
def test_an_echo_is_the_text_that_was_sent(kind: str, text: str) -> None:
    reader = tokenizer(kind)
    prompt = Prompt(reader.encode(text, 100), text)
    shown = text_of(prompt, reader)
    assert shown[prompt.num_added_spaces(shown, reader) :] == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hi", " Hi"])
def test_a_prompt_of_tokens_is_decoded_as_by_its_tokenizer(kind: str, text: str) -> None:
    reader = tokenizer(kind)
    prompt = Prompt(reader.encode(text, 100))
    shown = text_of(prompt, reader)
    assert shown[prompt.num_added_spaces(shown, reader) :] == reader._backend.decode(list(prompt.token_ids))


SENTENCES = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("text", ["the model", "<s>the model", "the<tool> model</s>", "</s>", "", "😀 the"])
def test_an_echo_has_the_special_tokens_that_were_sent_and_not_those_that_the_tokenizer_added(
    text: str, adds: bool
) -> None:
    backend = letter_tokenizer().backend_tokenizer
    if adds:
        backend.post_processor = SENTENCES
    reader = Tokenizer(TokenizerFacts(backend.to_str(), {}, {}))
    token_ids = reader.encode(text, 100)
    asked = CompletionRequest(model="m", prompt=text, max_tokens=0, echo=True, logprobs=0)
    scores = SampleResponse((), np.zeros(len(token_ids), np.float32))
    for prompt, wanted in (
        (Prompt(token_ids, text), text),
        (Prompt(token_ids), backend.decode(token_ids, skip_special_tokens=False)),
    ):
        echo = RequestChoices(asked, reader, Stops((2,)), [prompt]).echo(0, scores)
        assert echo.text == wanted
        assert echo.scored is not None and len(echo.scored.offsets) == len(token_ids)
        pieces = [echo.text[start:end] for start, end in pairwise([*echo.scored.offsets, len(echo.text)])]
        assert "".join(pieces) == echo.text
        for token, piece in zip(token_ids, pieces, strict=True):
            assert piece in ("", reader.name_of(token)) or "😀" in echo.text


def text_of(prompt: Prompt, reader: Tokenizer) -> str:
    text = SampleText(reader)
    text.add(prompt.token_ids)
    return text.take(last=True)
