"""The text of a sample as its tokens arrive: whole characters, and no stop string, for any split into pieces."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from trainhouse.server.text.sample_text import SampleText, StopSearch, StopString
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts

from ...letters import SPECIAL, VOCAB, letter_tokenizer

END = 2
LETTERS = letter_tokenizer()
TOKENIZER = Tokenizer(TokenizerFacts(LETTERS.backend_tokenizer.to_str(), {}, {}))
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def spelled(text: str) -> list[int]:
    """Encodes byte by byte, so that every character outside ASCII is several tokens."""
    alphabet = {TOKENIZER.token_bytes(token): token for token in range(len(SPECIAL), VOCAB)}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def sample_text(stops: Sequence[str] = (), min_tokens: int = 0) -> SampleText:
    return SampleText(TOKENIZER, [StopString(stop) for stop in stops], {END}, min_tokens)


def deltas(tokens: Sequence[int], stops: Sequence[str] = (), size: int = 1, min_tokens: int = 0) -> list[str]:
    text = sample_text(stops, min_tokens)
    taken = []
    for start in range(0, len(tokens), size):
        text.add(tokens[start : start + size])
        taken.append(text.take())
    return [*taken, text.take(last=True)]


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer like SentencePiece's of Llama 2 and Mistral: words with their space, bytes for anything else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(TokenizerFacts(backend.to_str(), {}, {}))


@given(st.lists(st.integers(len(SPECIAL), VOCAB - 1), max_size=40), st.integers(1, 7))
def test_the_pieces_of_any_tokens_join_to_what_the_tokenizer_decodes(tokens: list[int], size: int) -> None:
    taken = deltas(tokens, size=size)
    assert "".join(taken) == LETTERS.decode(tokens, clean_up_tokenization_spaces=False)


@given(st.text(max_size=30), st.integers(1, 5))
def test_no_partial_character_is_returned(text: str, size: int) -> None:
    taken = deltas(spelled(text), size=size)
    assert "".join(taken) == text
    assert INCOMPLETE in text or not any(INCOMPLETE in one for one in taken)


def test_an_emoji_is_returned_with_its_last_byte() -> None:
    assert deltas(spelled("a😀b")) == ["a", "", "", "", "😀", "b", ""]
    family = "👩‍👩‍👧"
    assert "".join(deltas(spelled(family), size=3)) == family


def test_a_character_that_stays_incomplete_is_replaced_at_the_end() -> None:
    assert deltas(spelled("a😀")[:3]) == ["a", "", "", INCOMPLETE]


def test_a_stop_string_is_cut_for_any_split_into_tokens() -> None:
    tokens = spelled("one two STOP three")
    for size in range(1, len(tokens) + 1):
        text = sample_text(["STOP"])
        taken, num_offsets = [], 0
        for start in range(0, len(tokens), size):
            num_offsets += len(text.add(tokens[start : start + size]))
            taken.append(text.take())
        assert "".join([*taken, text.take(last=True)]) == "one two "
        assert text.found_stop and num_offsets == len(tokens)


def test_a_possible_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    assert deltas(spelled("abSTxSTO"), ["STOP"]) == ["a", "b", "", "", "STx", "", "", "", "STO"]
    assert deltas(spelled("aaab"), ["aab"]) == ["", "", "a", "", ""]
    assert deltas(spelled("é¿"), ["é!"]) == ["", "", "", "é¿", ""], "a beginning may be more than a byte"


def test_the_first_complete_stop_string_counts() -> None:
    assert "".join(deltas(spelled("xabcd"), ["abcd", "bc"])) == "xa"
    assert "".join(deltas(spelled("xabcd"), ["bc", "abc"])) == "x"


def test_the_text_of_the_first_min_tokens_is_not_cut() -> None:
    tokens = spelled("STOP and STOP it")
    for size in (1, 3, len(tokens)):
        assert "".join(deltas(tokens, ["STOP"], size, min_tokens=6)) == "STOP and "


def test_a_stop_string_counts_if_it_ends_after_min_tokens() -> None:
    tokens = spelled("abCDe")
    for size in (1, 2, 3, len(tokens)):
        cut = ["".join(deltas(tokens, ["CD"], size, min_tokens)) for min_tokens in (3, 4, 5, 6)]
        assert cut == ["ab", "ab", "abCDe", "abCDe"]


STOPS = st.lists(st.text("ab😀", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab😀", max_size=12), STOPS, st.integers(1, 9))
def test_the_cut_does_not_depend_on_the_piece_size(text: str, stops: list[str], size: int) -> None:
    expected = text
    for end in range(len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            expected = text[: end - max(map(len, matched))]
            break
    assert "".join(deltas(spelled(text), stops, size)) == expected


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 12))
def test_stop_search_agrees_with_a_naive_search(text: str, stop: str, num_unstopped: int, size: int) -> None:
    search = StopSearch(StopString(stop))
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        found = search.find(piece, num_unstopped - start)
        ends = range(max(start, num_unstopped) + 1, start + len(piece) + 1)
        assert found == next((end - start for end in ends if text[:end].endswith(stop)), None)
        if found is not None:
            return
        begun = [length for length in range(len(stop)) if text[: start + len(piece)].endswith(stop[:length])]
        assert search.num_matched == max(begun)


def test_stop_search_takes_linear_time() -> None:
    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            search = StopSearch(StopString("a" * length + "b"))
            started = time.process_time()
            for _ in range(length // 10):
                assert search.find("a" * 10, 0) is None
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(80_000) < 20 * seconds(8_000), "ten times as much, where a search from the start takes a hundred"


def test_end_and_special_tokens_add_no_text() -> None:
    pad, tool = 0, SPECIAL.index("<tool>")
    assert "".join(deltas([*spelled("hi"), pad, *spelled("!"), END])) == "hi!"
    assert "".join(deltas([*spelled("hi"), tool, *spelled(" x")], ["i x"])) == "h"
    assert "".join(deltas([*spelled("a😀")[:2], pad, *spelled("b")])) == f"a{INCOMPLETE}b"


def test_offsets_count_the_characters_in_front_of_each_token() -> None:
    text = SampleText(TOKENIZER)
    assert text.add([*spelled("a😀b"), 0]) + text.add(spelled("c")) == [0, 1, 1, 1, 1, 2, 3, 3]


def test_tokens_are_named_by_their_text_their_bytes_or_their_number() -> None:
    assert TOKENIZER.name_of(spelled("a")[0]) == "a"
    assert TOKENIZER.name_of(spelled("é")[0]) == "bytes:\\xc3"
    assert TOKENIZER.name_of(VOCAB + 5) == f"token_id:{VOCAB + 5}"
    assert TOKENIZER.name_of(END) == "</s>"


@pytest.mark.parametrize("text", ["Hello world", "Hello 😀😀 world", "é\n"])
def test_words_with_spaces_and_bytes_of_other_tokenizers_read_as_text(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokens = tokenizer.encode(text, most_tokens=100)
    sample = SampleText(tokenizer)
    taken = []
    for token in tokens:
        sample.add([token])
        taken.append(sample.take())
    assert "".join(taken) == f" {text}", "within a text, a word keeps its space"
    assert not any(INCOMPLETE in one for one in taken)
