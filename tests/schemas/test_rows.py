"""Generated rows of datasets: the tokens before an answer are the chat endpoint's prompt, or the row is refused."""

import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from trainhouse import Datum
from trainhouse.schemas.chats.openai import ChatCompletionRequest
from trainhouse.server.text.read_tokenizer import read
from trainhouse.server.text.tokenizer import Tokenizer
from transformers import AutoTokenizer

from ..letters import letter_tokenizer
from ..live import CHATML

render_prompts = pytest.importorskip("trainhouse.server.openai.chats").render_prompts

CONTEXT = 1_000_000
NUM_ROWS = 250

# Qwen3's, from its release: tools, thoughts in the last answer alone, enable_thinking.
QWEN3 = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
# SmolLM2's, from its release: adds a message of the system, reads no tools.
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
# As Llama 3's: begins with BOS, trims, and the prompt ends with two line breaks.
HEADERS = """{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>

{{ (m.content | trim) + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>

{% endif %}"""
# As Phi-3's: the end of a whole chat is marked, too.
MARKS_THE_END = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content + '<|end|>' }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""
# As Mistral's: the answer follows a text without a token of its own.
BRACKETS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}{% else
%}[INST] {{ m.content }} [/INST] {% endif %}{% endfor %}"""
# Writes something behind the end of each answer.
APPENDS = CHATML.replace("<|im_end|>\n", "<|im_end|>\n{{ '(end of ' + message.role + ')' }}\n")


@dataclass(frozen=True)
class Release:
    """A chat template, the token that ends its answers, and the tokenizer's end token."""

    template: str
    end: str
    eos: str = "</s>"


RELEASES = {
    "qwen3": Release(QWEN3, "<|im_end|>", "<|im_end|>"),
    "qwen3, unnamed end": Release(QWEN3, "<|im_end|>"),
    "smollm2": Release(SMOLLM2, "<|im_end|>", "<|im_end|>"),
    "chatml, unnamed end": Release(CHATML, "<|im_end|>"),
    "headers": Release(HEADERS, "<|eot|>"),
    "marks the end": Release(MARKS_THE_END, "<|end|>"),
    "brackets": Release(BRACKETS, "</s>"),
    "appends": Release(APPENDS, "<|im_end|>"),
}


@pytest.fixture(scope="module", params=RELEASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Any, Tokenizer]:
    release = RELEASES[request.param]
    return release, *tokenizers(release, tmp_path_factory.mktemp("tokenizer"))


def tokenizers(release: Release, directory: Path) -> tuple[Any, Tokenizer]:
    """Returns the client's tokenizer and the server's; both put an end token behind texts, if they are asked to."""
    tokenizer = letter_tokenizer(2048)
    written = sorted(set(re.findall(r"<\|\w+\|>", release.template)) | {"<|user|>", "<|assistant|>"})
    tokenizer.add_tokens([*written, "<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.eos_token = release.eos
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        ["<s>", "$A", release.eos], ["<s>", "$A", "$B", release.eos], [("<s>", 1), (release.eos, end)]
    )
    tokenizer.chat_template = release.template
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory), Tokenizer(read(str(directory)))


TEXTS = [
    "one",
    "two words",
    "  led by spaces",
    "\n\nled by lines",
    "ends\n",
    "日本語 😀",
    "<b>&amp;",
    "{{ x }}",
    "",
    "7",
]
METADATA = """
id uuid prompt_id conversation_hash idx source data_source dataset original_dataset split subset category tags topic
question_type label language lang langdetect language_code model model_name gen_model timestamp created_at date url
avatarUrl source_url file_path license version difficulty level grade rating quality annotated_by num_turns
has_tools is_safe metadata answer expected_answer response solution generations chosen rejected ground_truth
"""
PROMPTS = """
context history documents functions images image_path passage userInput few_shot_examples premise hypothesis table
schema code problem task title abstract facts rules story transcript sentence description body notes reference
additional_info tool_output rationale column_7
"""
NAMES_OF_METADATA, PARTS_OF_PROMPTS = METADATA.split(), [*PROMPTS.split(), "文脈"]
CALL: dict[str, Any] = {
    "type": "function",
    "id": "1",
    "function": {"name": "rain", "arguments": {"city": "Rom", "n": 1}},
}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Case:
    """A chat as the endpoint takes it, and a row that says the same.

    read: the first messages that only are read. unread: a column or field that must be refused.
    """

    chat: list[dict[str, Any]]
    row: dict[str, Any]
    tools: Any = None
    variables: Any = None
    read: int = 0
    unread: str | None = None


def generated(draw: random.Random) -> Case:
    chat = [{"role": "system", "content": draw.choice(TEXTS)}] if draw.random() < 0.3 else []
    for _ in range(draw.choice((1, 1, 2, 3))):
        chat.append({"role": draw.choice(("user",) * 8 + ("tool", "developer")), "content": content(draw)})
        chat.append(answer(draw))
    case = Case(chat, {})
    if draw.random() < 0.25:
        case.tools = TOOLS
    if draw.random() < 0.25:
        case.variables = {"enable_thinking": draw.random() < 0.5}
    disguise(case, draw)
    if draw.random() < 0.3:
        case.row[draw.choice(NAMES_OF_METADATA)] = draw.choice(("abc", 3, None))
    if draw.random() < 0.1:
        case.unread = draw.choice(PARTS_OF_PROMPTS)
        case.row[case.unread] = draw.choice(("an unread text", ["unread"], [{"role": "user", "content": "unread"}]))
    return case


def content(draw: random.Random) -> Any:
    text = draw.choice(TEXTS)
    return [{"type": "text", "text": text}, {"type": "text", "text": "more"}] if draw.random() < 0.2 else text


def answer(draw: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content(draw)}
    if draw.random() < 0.15:
        call = json.loads(json.dumps(CALL))
        if draw.random() < 0.7:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        message |= {"tool_calls": [call], "content": draw.choice((None, "", "calling"))}
    if draw.random() < 0.1:
        message["reasoning_content"] = "hm"
    if draw.random() < 0.2:
        message["weight"] = draw.choice((0, 1, 0.5))
    return message


def disguise(case: Case, draw: random.Random) -> None:
    """Fills the row: the chat in one of the forms of datasets."""
    chat, row = [dict(message) for message in case.chat], case.row
    if chat[0]["role"] == "system" and draw.random() < 0.5:
        row[draw.choice(("system", "system_prompt"))] = chat.pop(0)["content"]
        if not next(iter(row.values())):
            case.chat.pop(0)  # an empty column is none
    roles = {message["role"] for message in chat}
    form = draw.choice(("messages", "conversations", "prompt", "question", "instruction"))
    if form == "conversations" and roles <= {"system", "user", "assistant"}:
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        row["conversations"] = [
            {"from": names[message.pop("role")], "value": message.pop("content"), **message} for message in chat
        ]
    elif form == "prompt":
        case.read = len(case.chat) - 1
        row |= {"prompt": chat[:-1], "completion": chat[-1:]}
    elif (
        form in ("question", "instruction") and len(chat) == 2 and chat[0]["role"] == "user" and all(map(is_text, chat))
    ):
        names = ("question", "answer") if form == "question" else ("instruction", "output")
        row |= dict(zip(names, (message["content"] for message in chat), strict=True))
    else:
        row["messages"] = chat
    if case.tools:
        row["tools"] = case.tools if draw.random() < 0.5 else json.dumps(case.tools)
    if case.variables:
        row["chat_template_kwargs"] = case.variables
    if draw.random() < 0.2:
        row["tool_choice"] = "auto"


def is_text(message: Mapping[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)


def prompt_of(case: Case, number: int, reader: Tokenizer) -> list[int]:
    """Returns the prompt that the chat endpoint makes of the messages before an answer."""
    body = {"model": "m", "messages": case.chat[:number], "tools": case.tools, "chat_template_kwargs": case.variables}
    (prompt,) = render_prompts(ChatCompletionRequest.model_validate(body), reader, CONTEXT)
    return list(prompt.token_ids)


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates read it, by the shortest way."""
    fields = {name: value for name, value in message.items() if value is not None and name != "weight"}
    if isinstance(fields.get("content"), list):
        fields["content"] = "\n".join(part["text"] for part in fields["content"])
    for call in fields.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"content": "", **fields}


def written(case: Case, num: int, tokenizer: Any, asks: bool = False) -> str:
    """Returns the first messages as transformers writes them."""
    return tokenizer.apply_chat_template(
        [plain(json.loads(json.dumps(message))) for message in case.chat[:num]],
        tools=case.tools,
        tokenize=False,
        add_generation_prompt=asks,
        **(case.variables or {}),
    )


def answers(case: Case, train_on: str) -> list[int]:
    """Returns the numbers of the answers that must stand behind their prompts."""
    found = [number for number, message in enumerate(case.chat) if message["role"] == "assistant"]
    if train_on == "all":
        return found
    found = [number for number in found if case.chat[number].get("weight", 1) and number >= case.read]
    return found[-1:] if train_on == "last" else found


def refusals(case: Case, train_on: str, release: Release, tokenizer: Any, reader: Tokenizer) -> list[str]:
    """Returns the reasons to refuse the row."""
    trained, found = answers(case, train_on), []
    if case.unread:
        found.append(f"the column {case.unread} may be a part of the prompt")
    if any(case.row.get(name) for name in ("system", "system_prompt")) and case.chat[1]["role"] == "developer":
        found.append("another one as its first message")
    if case.tools and "tools" not in release.template:
        found.append("the chat template ignores tools")
    if not trained and train_on != "all":
        found.append('no message of the role "assistant" is trained on')
    for number in trained:
        fields = [name for name in ("tool_calls", "reasoning_content") if name in case.chat[number]]
        found += [f"ignores messages.{number}.{name}" for name in fields if name not in release.template]
    if found:
        return found
    done, text = [], ""
    for number in trained:
        asked, prompt = written(case, number, tokenizer, asks=True), prompt_of(case, number, reader)
        answered = written(case, number + 1, tokenizer)
        if not answered.startswith(asked):
            return ["prompt for an answer is not how it writes the answer"]
        if not asked.startswith(text) or prompt[: len(done)] != done:
            return ["in another way when more follow"]
        text = answered[: answered.index(release.end, len(asked)) + len(release.end)]
        done = prompt
    whole = written(case, len(case.chat), tokenizer)
    changes = [number for number, message in enumerate(case.chat) if message.get("weight", 1) != 1]
    texts = [written(case, num, tokenizer) for number in changes for num in (number, number + 1) if num]
    if train_on == "all" and not all(map(whole.startswith, (text, *texts))):
        return ["in another way when more follow"]
    return []


def check(case: Case, datum: Datum, train_on: str, release: Release, tokenizer: Any, reader: Tokenizer) -> None:
    tokens = [int(datum.tokens[0]), *datum.loss_fn_inputs["target_tokens"].tolist()]
    weights = [0.0, *datum.loss_fn_inputs["weights"].tolist()]
    done, end = 0, tokenizer.convert_tokens_to_ids(release.end)
    for number in answers(case, train_on):
        prompt, weight = prompt_of(case, number, reader), case.chat[number].get("weight", 1)
        assert tokens[: len(prompt)] == prompt[: len(tokens)]
        if train_on != "all":
            assert not any(weights[done : len(prompt)])
        elif not weight and end not in tokens[len(prompt) :]:
            continue  # a datum ends with the last token that is trained on
        done = tokens.index(end, len(prompt)) + 1
        assert set(weights[len(prompt) : done]) == {weight}
        sampled = tokenizer.decode(tokens[len(prompt) : done])
        answered = written(case, number + 1, tokenizer)
        assert answered.startswith(tokenizer.decode(prompt) + sampled), "the answer is written after its prompt"
        said = plain(json.loads(json.dumps(case.chat[number])))["content"].strip()
        assert said in sampled
    if train_on != "all":
        assert done == len(tokens)
        return
    whole = written(case, len(case.chat), tokenizer)
    assert whole.startswith(tokenizer.decode(tokens))
    assert whole == tokenizer.decode(tokens) or not case.chat[-1].get("weight", 1)
    for number, message in enumerate(case.chat):
        if (weight := message.get("weight", 1)) != 1:
            start = len(reader.chats.encode(written(case, number, tokenizer)))
            assert set(weights[start : len(reader.chats.encode(written(case, number + 1, tokenizer)))]) <= {weight}


def test_the_tokens_before_an_answer_are_the_prompt_of_the_chat_endpoint(case: tuple[Release, Any, Tokenizer]) -> None:
    release, tokenizer, reader = case
    draw, results = random.Random(5), Counter()
    for _ in range(NUM_ROWS):
        one, train_on = generated(draw), draw.choice(("assistant", "last", "all"))
        before, refused = json.dumps(one.row), refusals(one, train_on, release, tokenizer, reader)
        try:
            datum = Datum.from_row(one.row, tokenizer, train_on)
        except ValueError as error:
            assert any(reason in str(error) for reason in refused), f"{error}: {one.row}, trained on {train_on}"
            continue
        assert not refused, f"accepted, trained on {train_on}: {one.row}"
        assert json.dumps(one.row) == before, "rows are not changed"
        check(one, datum, train_on, release, tokenizer, reader)
        results[train_on] += 1
    assert min(results[train_on] for train_on in ("assistant", "last", "all")) > NUM_ROWS / 20, results


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TALK = [
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b", "weight": 0},
    *2 * [{"from": "human", "value": "c"}],
]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizers(RELEASES["chatml, unnamed end"], tmp_path_factory.mktemp("tokenizer"))[0]


FORMS = [
    {"messages": CHAT},
    {"conversations": [TALK[0], {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "output": "b"},
    {"question": "a", "answer": "b"},
    {"text": "a"},
]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_a_column_of_text_that_may_be_a_part_of_the_prompt_is_refused_by_name(
    form: dict[str, Any], chatml: Any
) -> None:
    accepted = Datum.from_row(form, chatml).tokens.tolist()
    for name in PARTS_OF_PROMPTS:
        unread = f"the column {name} may be a part of the prompt, and is not read next to .*: .* or drop the column"
        for text in ("unread", ["unread"], [[0, "unread"]], {"a": ["unread"]}, b"unread", np.array(["unread"])):
            with pytest.raises(ValueError, match=unread):
                Datum.from_row(form | {name: text}, chatml)
        for other in (
            None,
            "",
            " ",
            [],
            {},
            "[]",
            3,
            True,
            [1, 2.5],
            np.ones((2, 2)),
            [np.ones(2)],
            {"a": None, "b": 1},
        ):
            assert Datum.from_row(form | {name: other}, chatml).tokens.tolist() == accepted
    for name in set(NAMES_OF_METADATA) - set(form):
        for value in ("text", ["text"], {"a": "text"}, 1, datetime(2024, 1, 1)):
            assert Datum.from_row(form | {name: value}, chatml).tokens.tolist() == accepted


def test_a_field_of_a_message_that_may_be_a_part_of_the_prompt_is_refused_by_name(chatml: Any) -> None:
    for name in PARTS_OF_PROMPTS:
        with pytest.raises(
            ValueError, match=f"messages.0.{name} is not read by the chat template: write it into the con"
        ):
            Datum.from_chat([CHAT[0] | {name: "unread"}, CHAT[1]], chatml)
    expected = Datum.from_chat(CHAT, chatml).tokens.tolist()
    for name in NAMES_OF_METADATA:
        assert Datum.from_chat([CHAT[0] | {name: "text"}, CHAT[1]], chatml).tokens.tolist() == expected
    for name in ("refusal", "annotations", "provider_specific_fields"):
        for nothing in (None, [], {"refusal": None}):
            assert Datum.from_chat([CHAT[0], CHAT[1] | {name: nothing}], chatml).tokens.tolist() == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [], "prompt": "x"}, "messages is empty"),
        ({"prompt": [], "completion": CHAT[1:]}, "prompt is empty"),
        ({"messages": "a"}, "messages is 'a': expected a list"),
        ({"messages": [{"role": "user", "text": "a"}, CHAT[1]]}, r"messages.0 \(user\) has no content"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}, CHAT[1]]}, "messages.0.images is not read"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, r"messages.1 \(assistant\) has no content"),
        ({"messages": [CHAT[0], CHAT[1] | {"train": False}]}, "messages.1.train is not read: write weight"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": "0"}]}, "messages.1.weight is '0': expected a number"),
        ({"messages": [CHAT[0], CHAT[1] | {"tool_calls": [CALL]}]}, "template ignores messages.1.tool_calls"),
        ({"messages": [CHAT[0], CHAT[1] | {"thinking": "hm"}]}, "template ignores messages.1.thinking"),
        ({"messages": [CHAT[1]]}, "messages.0 is an answer to nothing"),
        ({"messages": CHAT, "tools": TOOLS}, "template ignores tools"),
        ({"messages": CHAT, "tools": "{"}, "tools is not JSON"),
        ({"messages": CHAT, "tools": [print]}, "tools has something that is not JSON"),
        ({"messages": CHAT, "enable_thinking": False}, "the column enable_thinking is not read: put it into chat_t"),
        ({"messages": CHAT, "weight": 0}, "the column weight is not read"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}, *CHAT]}, "and another one as its first mess"),
        ({"system": "x", "prompt": "a", "completion": "b"}, "the column system may be a part of the prompt"),
        ({"tools": TOOLS, "prompt": "a", "completion": "b"}, "the column tools may be a part of the prompt"),
        ({"chat_template_kwargs": {"a": 1}, "question": "a", "answer": "b", "text": "c"}, "the column text may be"),
        (
            {"chat_template_kwargs": {"a": 1}, "prompt": "a", "completion": "b"},
            "the column chat_template_kwargs may be",
        ),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "message 0 is from 'function_call'"),
        ({"conversations": TALK}, 'no message of the role "assistant" is trained on'),
        ({"question": "a", "answer": {"text": "b"}}, "answer is {'text': 'b'}: expected a text"),
        ({"messages": [CHAT[0] | {"content": [{"type": "text"}]}, CHAT[1]]}, "messages.0.content has a part of type"),
        ({"messages": [CHAT[0] | {"content": [{"type": "image"}]}, CHAT[1]]}, "messages.0.content has a part of type"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused_by_name(row: dict[str, Any], words: str, chatml: Any) -> None:
    with pytest.raises(ValueError, match=words):
        Datum.from_row(row, chatml)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "a", "input": "", "output": "b", "text": "Below is a task.\na\n### Response: b"},
        {"prompt": "a", "prompt_id": "5f", "messages": CHAT, "num_turns": 2},
        {"messages": CHAT, "chosen": CHAT, "rejected": [], "tool_choice": "auto", "tools": [], "system": ""},
        {"messages": np.array(CHAT), "score": np.float32(3)},
    ],
    ids=str,
)
def test_columns_of_well_known_datasets_that_repeat_a_chat_are_accepted(row: dict[str, Any], chatml: Any) -> None:
    expected = Datum.from_chat(CHAT, chatml)
    assert (
        Datum.from_row(row, chatml).loss_fn_inputs["target_tokens"].tolist()
        == expected.loss_fn_inputs["target_tokens"].tolist()
    )


def test_weights_hold_when_everything_is_trained_on(chatml: Any) -> None:
    longer = [CHAT[0] | {"weight": 0}, *CHAT[1:], CHAT[0], CHAT[1] | {"weight": 0.5}]
    datum = Datum.from_row({"messages": longer}, chatml, train_on="all")
    first = len(chatml.apply_chat_template(CHAT[:1], return_dict=False))
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert set(weights[: first - 1]) == {0} and set(weights[first - 1 :]) == {1, 0.5}
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    datum = Datum.from_row({"conversations": talk}, chatml, train_on="all")
    assert chatml.decode(datum.tokens).endswith("user\na<|im_end|>"), "the second message is not trained on"


def test_a_prompt_and_its_completion_have_no_end_token_between_them(chatml: Any) -> None:
    datum = Datum.from_row({"prompt": "one ", "completion": "two"}, chatml)
    tokens = [*datum.tokens, datum.loss_fn_inputs["target_tokens"][-1]]
    assert chatml("a")["input_ids"][-1] == chatml.eos_token_id, "this tokenizer puts an end token behind texts"
    assert chatml.decode(tokens) == "<s>one two</s>"


def test_a_template_that_reads_only_parts_gets_them(tmp_path: Path) -> None:
    parts = "{{ m.content }}<|im_end|>", "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>"
    template = CHATML.replace("message", "m").replace("ms", "messages").replace(*parts)
    tokenizer, reader = tokenizers(Release(template, "<|im_end|>"), tmp_path)
    datum = Datum.from_row({"messages": CHAT}, tokenizer)
    assert tokenizer.decode(datum.tokens).endswith("user\na<|im_end|>\n<|im_start|>assistant\nb")
    assert prompt_of(Case(CHAT, {}), 1, reader) == datum.tokens.tolist()[:-1]


def test_the_check_finds_a_lost_system_message(tmp_path: Path) -> None:
    """Negative control."""
    release = RELEASES["chatml, unnamed end"]
    tokenizer, reader = tokenizers(release, tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    datum = Datum.from_row({"messages": chat}, tokenizer)
    check(Case(chat, {}), datum, "assistant", release, tokenizer, reader)
    with pytest.raises(AssertionError):
        check(Case([{"role": "system", "content": "x"}, *chat], {}, read=0), datum, "last", release, tokenizer, reader)
    shifted = Datum(datum.tokens, {**datum.loss_fn_inputs, "weights": np.roll(datum.loss_fn_inputs["weights"], -1)})
    with pytest.raises(AssertionError):
        check(Case(chat, {}), shifted, "assistant", release, tokenizer, reader)
