"""An echoed prompt is the text that was sent, even if its tokenizer prepends or strips spaces."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from trainhouse.server.openai.prompts import Prompt
from trainhouse.server.text.sample_text import SampleText
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts

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


def text_of(prompt: Prompt, reader: Tokenizer) -> str:
    text = SampleText(reader)
    text.add(prompt.token_ids)
    return text.take(last=True)
