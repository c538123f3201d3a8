"""Reads the rows of the usual datasets as chats or texts. What a model would read and is not understood is refused."""

import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from .messages import REASONING, Chat, ChatError, Message, may_be_prompt, plain, template_message
from .openai import ChatMessage

_ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "tool": "tool",
    **dict.fromkeys(("gpt", "assistant", "bot", "model", "chatgpt"), "assistant"),
}
"""Roles of the ShareGPT format, in which messages have `from` and `value`."""

_MASKS = ("train", "train_detail", "trainable", "training", "loss", "loss_mask", "mask")
_ROW_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "loss_mask", "mask")
_SETTINGS = (
    "enable_thinking",
    "thinking",
    "reasoning_effort",
    "thinking_budget",
    "tool_choice",
    "add_generation_prompt",
)
_SYSTEM = ("system", "system_prompt")
_BESIDE_CHATS = (*_SYSTEM, "tools", "chat_template_kwargs")
_CHATS = ("messages", "conversations")


Row = Mapping[str, object]


@dataclass(frozen=True)
class WeightedChat:
    """A chat, with the weight of each of its messages in training."""

    chat: Chat
    weights: Sequence[float]


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and the text that follows it, without chat template."""

    prompt: str
    completion: str
    prompt_is_trained: bool


def read_chat(
    messages: object,
    tools: Sequence[JsonValue] | None = None,
    variables: Mapping[str, JsonValue] | None = None,
    place: str = "messages",
) -> WeightedChat:
    """Returns a chat in the form of OpenAI or ShareGPT.

    Args:
        place: how errors call the messages.
    Raises:
        ChatError: a message is not understood.
        TypeError: a message is no dict.
    """
    given = _listed(messages, place)
    if not given:
        raise ChatError(f"{place} is empty: a chat has at least one message", place)
    read, weights = [], []
    for number, message in enumerate(given):
        sent = _sent_message(message, number, place)
        weights.append(_weight(sent, f"{place}.{number}"))
        if all(sent.get(field) is None for field in ("content", "tool_calls", *REASONING)):
            raise ChatError(f"{place}.{number} ({sent['role']}) has no content: leave it out", f"{place}.{number}")
        read.append(template_message(f"{place}.{number}", _validated(sent, f"{place}.{number}")))
    return WeightedChat(Chat(read, _tools(tools), variables=_variables(variables)), weights)


def read_row(row: Row, prompt_is_trained: bool = False) -> WeightedChat | PromptCompletion:
    """Returns what a row holds. See Datum.from_row.

    Args:
        prompt_is_trained: trains the messages or the text of a prompt, too, instead of the completion alone.
    Raises:
        ChatError: columns or messages are not understood.
        TypeError: a message is no dict.
    """
    row = {str(name): plain(value) for name, value in row.items()}
    form = next((form for form in _FORMS if all(_is_given(row, column) for column in form.columns)), None)
    if form is None:
        if empty := next((name for name in _CHATS if row.get(name) is not None), None):
            raise ChatError(f"{empty} is empty: a chat has at least one message", empty)
        named = [form.columns for form in _FORMS if all(column in row for column in form.columns)]
        if null := next((column for columns in named for column in columns if row[column] is None), None):
            raise ChatError(f"{null} is None: fill it in, or leave the row out", null)
        forms = "; ".join(" and ".join(form.columns) for form in _FORMS)
        raise ChatError(f"the row has the columns {', '.join(row) or '(none)'}: expected {forms}")
    content = form.read(row, prompt_is_trained)
    is_chat = isinstance(content, WeightedChat)
    _refuse_others(row, (*form.columns, *form.optional, *(_BESIDE_CHATS if is_chat else ())), content)
    return _with_columns(content, row) if is_chat else content


def _is_given(row: Row, column: str) -> bool:
    return row.get(column) is not None and not (column in _CHATS and _is_empty(row[column]))


def _with_columns(given: WeightedChat, row: Row) -> WeightedChat:
    """Adds the columns that belong to a chat."""
    system, messages, weights = _system(row), given.chat.messages, given.weights
    first: Message = messages[0]
    has_other = first["role"] in ("system", "developer")
    if system is not None and has_other and first["content"] != system:
        raise ChatError("the row has a column of the system's message, and another one as its first message")
    if system is not None and not has_other:
        messages, weights = [{"role": "system", "content": system}, *messages], [1.0, *weights]
    tools, variables = _tools(row.get("tools")), _variables(row.get("chat_template_kwargs"))
    return WeightedChat(Chat(messages, tools, variables=variables), weights)


def _system(row: Row) -> str | None:
    given = [name for name in _SYSTEM if row.get(name)]
    if len(given) > 1:
        raise ChatError(f"the row has the columns {' and '.join(given)}: leave one out", given[1])
    return _text(row, given[0]) if given else None


def _refuse_others(row: Row, used: Sequence[str], content: WeightedChat | PromptCompletion) -> None:
    """Raises ChatError for columns that a model may have to read, and that nothing reads."""
    for name, value in row.items():
        if name in used or _is_empty(value) or (name, value) == ("tool_choice", "auto"):
            continue
        if name in _ROW_WEIGHTS and value != 1:
            raise ChatError(f"the column {name} is not read: scale the weights of the datum, or drop the column", name)
        if name in _SETTINGS:
            raise ChatError(f"the column {name} is not read: put it into chat_template_kwargs, or drop it", name)
        if (name in _BESIDE_CHATS or may_be_prompt(name, value)) and not _repeats(name, value, row, used, content):
            others = " and ".join(column for column in used if not _is_empty(row.get(column)))
            raise ChatError(
                f"the column {name} may be a part of the prompt, and is not read next to {others}: write it into "
                "these, or drop the column",
                name,
            )


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and (not value or value == "[]"))


def _repeats(name: str, value: object, row: Row, used: Sequence[str], content: WeightedChat | PromptCompletion) -> bool:
    """Returns whether a column only repeats what the model reads anyway, such as a chat's first question."""
    if not isinstance(value, str):
        return any(value == row.get(column) for column in used)
    if isinstance(content, PromptCompletion):
        return value == content.prompt
    said = [(message["role"], str(message["content"]).strip()) for message in content.chat.messages]
    if value.strip() in [text for role, text in said if role != "assistant"]:
        return True
    last_line = [text.rpartition("\n")[2] for _, text in said]  # an instruction and its input may stand apart
    return name == "text" and all(line in value for line in last_line)


@dataclass(frozen=True)
class _Form:
    """Columns of the usual datasets, and how they are read."""

    columns: Sequence[str]
    read: Callable[[Row, bool], WeightedChat | PromptCompletion]
    """Takes whether the prompt is trained, too."""
    optional: Sequence[str] = ()


def _pair(row: Row, prompt_is_trained: bool) -> WeightedChat | PromptCompletion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(prompt, completion, prompt_is_trained)
    first, rest = _turns(prompt, "user", "prompt"), _turns(completion, "assistant", "completion")
    of_first = first.weights if prompt_is_trained else [0.0] * len(first.weights)
    return WeightedChat(Chat([*first.chat.messages, *rest.chat.messages]), [*of_first, *rest.weights])


def _turns(given: object, role: str, place: str) -> WeightedChat:
    if not isinstance(given, str | list | tuple):
        raise ChatError(f"{place} is {reprlib.repr(given)}: expected a text or a list of messages", place)
    return read_chat([{"role": role, "content": given}] if isinstance(given, str) else given, place=place)


def _instruction(row: Row) -> WeightedChat:
    asked, more = _text(row, "instruction"), _text(row, "input") if row.get("input") else ""
    return _exchange(f"{asked}\n\n{more}" if more else asked, _text(row, "output"))


def _exchange(question: str, answer: str) -> WeightedChat:
    return read_chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


_FORMS = (
    _Form(("messages",), lambda row, _: read_chat(row["messages"])),
    _Form(("conversations",), lambda row, _: read_chat(row["conversations"], place="conversations")),
    _Form(("prompt", "completion"), _pair),
    _Form(("instruction", "output"), lambda row, _: _instruction(row), ("input",)),
    _Form(("question", "answer"), lambda row, _: _exchange(_text(row, "question"), _text(row, "answer"))),
    _Form(("text",), lambda row, _: PromptCompletion("", _text(row, "text"), prompt_is_trained=True)),
)


def _text(row: Row, column: str) -> str:
    if not isinstance(value := row[column], str):
        raise ChatError(f"{column} is {reprlib.repr(value)}: expected a text", column)
    return value


def _listed(value: object, place: str) -> Sequence[object]:
    """Raises ChatError if the value is no list."""
    value = plain(value)
    if not isinstance(value, list | tuple):
        raise ChatError(f"{place} is {reprlib.repr(value)}: expected a list of messages", place)
    return value


def _sent_message(message: object, number: int, place: str) -> Mapping[str, object]:
    """Returns the message with role and content, also one in the form of ShareGPT."""
    if not isinstance(message, Mapping):
        raise TypeError(f"message {number} is of type {type(message).__name__}: pass dicts with role and content")
    if "role" in message:
        return message
    if "from" not in message or "value" not in message:
        raise ChatError(f"message {number} has no role, only {', '.join(map(str, message))}: name who speaks", place)
    if (speaker := str(message["from"])) not in _ROLES:
        known = ", ".join(_ROLES)
        raise ChatError(
            f"message {number} is from {speaker!r}, which is none of {known}: write it with role and content "
            "(calls of tools as tool_calls)",
            f"{place}.{number}",
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"content": message["value"], **others, "role": _ROLES[speaker]}


def _weight(message: Mapping[str, object], place: str) -> float:
    if mask := next((name for name in _MASKS if message.get(name) is not None), None):
        raise ChatError(f"{place}.{mask} is not read: write weight, 0 or 1", f"{place}.{mask}")
    weight = message.get("weight")
    if weight is None:
        return 1.0
    if not isinstance(weight, bool | int | float) or not math.isfinite(weight):
        raise ChatError(f"{place}.weight is {reprlib.repr(weight)}: expected a number", f"{place}.weight")
    return float(weight)


def _validated(message: Mapping[str, object], place: str) -> ChatMessage:
    try:
        return ChatMessage.model_validate(dict(message))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = next((part for part in first["loc"] if isinstance(part, str)), "")
        raise ChatError(
            f"{place}.{name} is {reprlib.repr(first['input'])}: {first['msg']}", f"{place}.{name}"
        ) from None


def _tools(given: object) -> Sequence[JsonValue] | None:
    """Returns the tools of a row, also ones that are written as JSON; None without any."""
    tools = _parsed(given, "tools")
    if not isinstance(tools, list | tuple):
        raise ChatError(f"tools is {reprlib.repr(tools)}: expected a list", "tools")
    try:
        return json.loads(json.dumps(tools)) or None
    except (TypeError, ValueError, RecursionError):
        raise ChatError("tools has something that is not JSON: pass descriptions of functions", "tools") from None


def _variables(given: object) -> Mapping[str, JsonValue] | None:
    variables = _parsed(given, "chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise ChatError(
            f"chat_template_kwargs is {reprlib.repr(variables)}: expected an object", "chat_template_kwargs"
        )
    return variables


def _parsed(given: object, place: str) -> object:
    given = plain(given)
    if given is None or given == "":
        return []
    try:
        return from_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ChatError(f"{place} is not JSON: {error}", place) from None
