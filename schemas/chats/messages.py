"""Brings the messages of a chat into the form that chat templates expect."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from numbers import Number

from pydantic import JsonValue
from pydantic_core import from_json

from .openai import ChatMessage

Message = Mapping[str, JsonValue]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of an assistant's reasoning. Templates read the first two."""

_READ = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING}

_METADATA_WORDS = {
    *("id", "uuid", "uid", "guid", "key", "hash", "sha", "index", "idx", "name", "username", "version", "revision"),
    *("source", "origin", "dataset", "subset", "split", "fold", "corpus", "collection", "dump", "license", "model"),
    *("category", "categories", "subcategory", "topic", "subtopic", "subject", "domain", "genre", "tag", "keyword"),
    *("label", "class", "type", "kind", "style", "format", "level", "difficulty", "ability", "skill", "status"),
    *("score", "rating", "rank", "grade", "quality", "reward", "count", "length", "len", "size", "token", "control"),
    *("language", "lang", "langdetect", "locale", "country", "url", "uri", "link", "path", "filename", "filepath"),
    *("date", "datetime", "time", "timestamp", "year", "at", "by", "from", "created", "updated", "modified", "added"),
    *("author", "creator", "annotator", "annotation", "citation", "copyright", "generator", "repo", "repository"),
    *("meta", "metadata"),
}
"""Last words of names of metadata, such as prompt_id."""

_TARGET = re.compile(
    "((expected|correct|reference|final|gold|ground|best|model|generated|original|orig|short|long)_)*"
    "(answer|response|output|completion|solution|generation|target|truth|chosen|rejected)s?"
)
"""Names of other answers than the one that is trained on."""

_MEDIA_WORDS = {"image", "picture", "photo", "audio", "video"}


class ChatError(ValueError):
    """A chat that cannot be written. place: the field at fault, such as `messages.2.content`, if it is one."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


class ToolsNotSupported(ChatError):
    """The chat has tools, but the chat template does not read them."""


@dataclass(frozen=True)
class Chat:
    """A chat to be written by a template."""

    messages: Sequence[Message]
    """Messages in the form that templates expect, see `template_message`."""
    tools: Sequence[JsonValue] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, JsonValue] | None = None
    """Further variables for the template."""


def template_message(place: str, message: ChatMessage) -> dict[str, JsonValue]:
    """Returns the message as chat templates expect it.

    Text parts are joined by line breaks. An assistant message without content gets an empty string, because many
    templates concatenate it.

    Raises:
        ChatError: it has no content, parts that are not text, or tool calls whose arguments are not JSON.
    """
    fields = message.model_dump(exclude={"weight"})
    if message.content is None:
        if message.role != "assistant":
            raise ChatError(f"{place} ({message.role}) has no content: send text", f"{place}.content")
        fields["content"] = ""
    if isinstance(message.content, list):
        if wrong := next((part for part in message.content if part.type != "text"), None):
            raise ChatError(
                f"{place}.content has a part of type {wrong.type!r}, which is not supported: send text",
                f"{place}.content",
            )
        if any("text" not in part.model_fields_set for part in message.content):
            raise ChatError(f"{place}.content has a part of type 'text' without text", f"{place}.content")
        fields["content"] = "\n".join(part.text for part in message.content)
    if message.tool_calls is not None:
        fields["tool_calls"] = [_template_call(f"{place}.tool_calls", call) for call in message.tool_calls]
    return fields


def _template_call(place: str, call: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Parses the arguments of a tool call: clients send them as a JSON string, templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        # The order of the arguments is kept, because templates may print them.
        return {**call, "function": {**function, "arguments": from_json(text or "{}")}}
    except ValueError as error:
        raise ChatError(f"{place} has arguments that are not valid JSON: {error}", place) from None


def ignored_field(message: Message) -> str | None:
    """Returns a field that may be a part of the prompt, but that templates usually do not read."""
    return next((name for name in message if name not in _READ and may_be_prompt(name, message[name])), None)


def may_be_prompt(name: str, value: object) -> bool:
    """Returns whether a column or field that nothing reads may be a part of the prompt.

    It holds text, and its name is none that metadata or targets usually have.
    """
    if not _holds_text(value):
        return False
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)]
    forms = {*words, *(word.removesuffix("s") for word in words)}
    if not words or forms & _MEDIA_WORDS:
        return True
    is_metadata = bool({words[-1], words[-1].removesuffix("s")} & _METADATA_WORDS)
    is_fact = words[0] in ("num", "number", "has", "is", "lang", "language")
    return not (is_metadata or is_fact or _TARGET.fullmatch("_".join(words)))


def _holds_text(value: object) -> bool:
    """Returns whether there is anything but numbers and dates in the value, such as text or an image."""
    pending = [value]
    while pending:
        match plain(pending.pop()):
            case Mapping() as entries:
                pending.extend(entries.values())
            case list() | tuple() as items:
                pending.extend(items)
            case str() as text if text.strip() in ("", "[]", "{}"):
                pass
            case None | Number() | date():
                pass
            case _:
                return True
    return False


def plain(value: object) -> object:
    """Returns the value, as plain Python if it is of numpy, as pandas gives it."""
    return getattr(value, "tolist", lambda: value)()
