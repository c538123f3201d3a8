"""Chats and rows of datasets as data: which tokens are trained on, templates that cannot be split, usual slips."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from trainhouse.client.data import as_tokens

from ..live import CHATML, LiveServer, save_byte_tokenizer

# As Qwen3's: thoughts are shown in the last answer alone.
THOUGHTS = CHATML.replace(
    "{{ message.content }}",
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}",
)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "22"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_with(CHATML, tmp_path_factory.mktemp("tokenizer"))


def tokenizer_with(template: str | None, directory: Path) -> Any:
    from transformers import AutoTokenizer

    save_byte_tokenizer(directory, ("<|im_start|>", "<|im_end|>"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    return tokenizer


def trained_on(datum: Datum, tokenizer: Any) -> str:
    """Returns the text of the targets with a weight, each run of them in brackets."""
    text, before = "", 0.0
    for token, weight in zip(datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"], strict=True):
        text += "[" if weight and not before else "]" if before and not weight else ""
        text += tokenizer.decode([token]) if weight else ""
        before = weight
    return text + "]" * bool(before)


def whole_text(datum: Datum, tokenizer: Any) -> str:
    assert datum.tokens[1:].tolist() == datum.loss_fn_inputs["target_tokens"][:-1].tolist(), "targets are shifted"
    return tokenizer.decode([*datum.tokens, datum.loss_fn_inputs["target_tokens"][-1]])


def test_the_answers_are_trained_on_through_their_end(tokenizer: Any) -> None:
    datum = Datum.from_chat(CHAT, tokenizer)
    assert trained_on(datum, tokenizer) == "[1<|im_end|>][22<|im_end|>]"
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert whole_text(datum, tokenizer) == text.removesuffix("\n"), "what follows the last answer is left out"


def test_the_prompt_of_an_answer_is_what_sampling_gives_the_model(tokenizer: Any) -> None:
    datum = Datum.from_chat(CHAT[:3], tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    first = int(np.flatnonzero(datum.loss_fn_inputs["weights"])[0])
    assert datum.tokens[: first + 1].tolist() == prompt


def test_one_answer_or_everything_may_be_trained_on(tokenizer: Any) -> None:
    assert trained_on(Datum.from_chat(CHAT, tokenizer, train_on="last"), tokenizer) == "[22<|im_end|>]"
    everything = Datum.from_chat(CHAT, tokenizer, train_on="all")
    assert everything.loss_fn_inputs["weights"].all()
    assert whole_text(everything, tokenizer) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_a_message_may_have_a_weight(tokenizer: Any) -> None:
    chat = [*CHAT[:2], CHAT[2] | {"weight": 0}, CHAT[3], CHAT[4] | {"weight": 0.5}]
    datum = Datum.from_chat(chat, tokenizer)
    assert trained_on(datum, tokenizer) == "[22<|im_end|>]"
    assert set(datum.loss_fn_inputs["weights"].tolist()) == {0.0, 0.5}


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_remedy(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(THOUGHTS, tmp_path)
    with pytest.raises(ValueError, match=r"in another way when more follow.* make a datum of each turn"):
        Datum.from_chat(CHAT, tokenizer)
    texts = [trained_on(Datum.from_chat(CHAT[: n + 1], tokenizer, train_on="last"), tokenizer) for n in (2, 4)]
    assert texts == [f"[<think>\n\n</think>\n\n{answer}<|im_end|>]" for answer in ("1", "22")]


def test_a_prompt_that_is_not_how_answers_are_written_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), tmp_path)
    with pytest.raises(ValueError, match="prompt for an answer is not how it writes the answer"):
        Datum.from_chat(CHAT[:3], tokenizer)
    thoughtful = [*CHAT[:2], {"role": "assistant", "content": "<think>\nhm</think>1"}]
    assert trained_on(Datum.from_chat(thoughtful, tokenizer), tokenizer) == "[hm</think>1<|im_end|>]"


def test_a_chat_that_trains_nothing_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'no message of the role "assistant".* the chat has system, user'):
        Datum.from_chat(CHAT[:2], tokenizer)
    with pytest.raises(ValueError, match="message 0 has no role, only content"):
        Datum.from_chat([{"content": "x"}], tokenizer)
    with pytest.raises(TypeError, match="message 0 is of type str: pass dicts"):
        Datum.from_chat(["x"], tokenizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no chat template"):
        Datum.from_chat(CHAT, tokenizer_with(None, tmp_path))


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"messages": CHAT[1:3], "source": "x"}, "[1<|im_end|>]"),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}]}, "[1<|im_end|>]"),
        ({"prompt": CHAT[1:2], "completion": CHAT[2:3]}, "[1<|im_end|>]"),
        ({"prompt": "one ", "completion": "1"}, "[1</s>]"),
        ({"instruction": "count", "input": "one", "output": "1"}, "[1<|im_end|>]"),
        ({"question": "one", "answer": "1"}, "[1<|im_end|>]"),
        ({"text": "all of it"}, "[ll of it</s>]"),
    ],
)
def test_rows_of_the_usual_datasets_are_read(row: dict[str, Any], trained: str, tokenizer: Any) -> None:
    assert trained_on(Datum.from_row(row, tokenizer), tokenizer) == trained


@pytest.mark.parametrize("train_on", ["Last", "lst", "asistant", "", None])
def test_an_unknown_choice_of_what_is_trained_on_is_refused(train_on: Any, tokenizer: Any) -> None:
    words = f"train_on is {train_on!r}: it should be one of 'assistant', 'last', 'all'"
    with pytest.raises(ValueError, match=words):
        Datum.from_chat(CHAT, tokenizer, train_on)
    for row in ({"messages": CHAT}, {"text": "a text"}):
        with pytest.raises(ValueError, match=words):
            Datum.from_row(row, tokenizer, train_on=train_on)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": None, "answer": "x"}, "question is None: fill it in"),
        ({"prompt": "a", "completion": None}, "completion is None: fill it in"),
        ({"messages": None}, "messages is None: fill it in"),
        ({"prompt": "a", "completion": 4}, "completion is 4: expected a text or a list of messages"),
        ({"prompt": 4, "completion": "a"}, "prompt is 4: expected a text or a list of messages"),
    ],
)
def test_a_wrong_value_of_a_known_column_is_named(row: dict[str, Any], words: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=words):
        Datum.from_row(row, tokenizer)


def test_a_row_that_is_no_dict_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="the row is of type list: pass a dict of columns"):
        Datum.from_row(CHAT, tokenizer)  # pyright: ignore[reportArgumentType]


def test_what_a_tokenizer_returns_by_default_is_refused_with_a_remedy(tokenizer: Any) -> None:
    for given in (tokenizer("hi"), tokenizer.apply_chat_template(CHAT, return_dict=True)):
        for make in (lambda given: Datum(given, {}), ModelInput.from_ints, as_tokens):
            with pytest.raises(ValueError, match=r'tokens is a dict of input_ids.*: pass its \["input_ids"\], or call'):
                make(given)
        assert as_tokens(given["input_ids"]) == list(given["input_ids"])


def test_other_rows_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the row has the columns label: expected messages; conversations; prompt and"):
        Datum.from_row({"label": 1}, tokenizer)
    with pytest.raises(ValueError, match="no token to predict"):
        Datum.from_row({"prompt": "", "completion": ""}, tokenizer)


def test_a_model_learns_a_chat(shared_server: LiveServer) -> None:
    with ServiceClient(shared_server.url, "tml-chats") as service:
        client = service.create_lora_training_client("tiny/chat", rank=4, seed=1)
        tokenizer: Any = client.get_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
        )
        datum = Datum.from_chat(CHAT, tokenizer)
        losses = []
        for _ in range(10):
            passed = client.forward_backward([datum], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-2)).result(60)
            losses.append(passed.result(60).metrics["loss:sum"])
        assert losses[-1] < losses[0] / 2


def test_usual_slips_are_type_errors_that_name_the_remedy(shared_server: LiveServer) -> None:
    with pytest.raises(TypeError, match="has no argument input_ids: write model_input="):
        Datum(input_ids=[1, 2], loss_fn_inputs={})  # pyright: ignore[reportCallIssue]
    with ServiceClient(shared_server.url, "tml-chats") as service:
        with pytest.raises(TypeError, match=r"has no argument lora_rank: write rank="):
            service.create_lora_training_client("tiny/chat", lora_rank=4)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError) as refused:
            service.create_lora_training_client("tiny/chat", lora_alpha=4)  # pyright: ignore[reportCallIssue]
        words = "create_lora_training_client has no argument lora_alpha: write none, alpha is 32 at every rank"
        assert str(refused.value) == words
        with pytest.raises(
            TypeError, match=r"create_full_training_client\(\) got an unexpected keyword argument 'depth'"
        ):
            service.create_full_training_client("tiny/chat", depth=4)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match=r"create_lora_training_client_async has no argument r: write rank="):
            service.create_lora_training_client_async("tiny/chat", r=4)  # pyright: ignore[reportCallIssue]
        client = service.create_lora_training_client("tiny/chat", rank=1)
        with pytest.raises(TypeError, match=r"no argument lr: write adam_params=AdamParams\(learning_rate=\.\.\.\)"):
            client.optim_step(lr=1e-3)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="has no argument loss: write loss_fn="):
            client.forward_backward([], loss="cross_entropy")  # pyright: ignore[reportCallIssue]
        sampler = service.create_sampling_client("tiny/chat")
        with pytest.raises(TypeError, match=r"no argument max_tokens: write sampling_params=SamplingParams\(max"):
            sampler.sample([1], max_tokens=3)  # pyright: ignore[reportCallIssue]
        assert sampler.sample([1], sampling_params=SamplingParams(max_tokens=3)).result(60).sequences
    with pytest.raises(ValueError, match="AdamParams has no lr: did you mean learning_rate"):
        AdamParams(lr=1e-3)  # pyright: ignore[reportCallIssue]
