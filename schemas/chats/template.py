"""Renders chats with a model's Jinja template, exactly as transformers does.

What templates can see and do follows `transformers.utils.chat_template_utils`. Importing that would load torch, so this
is a copy, and a test compares the two.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from itertools import takewhile

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from pydantic import JsonValue

from .messages import REASONING, Chat, ChatError, Message, ToolsNotSupported, ignored_field

_PROBE = "answered"

_RENDER_SECONDS = 10.0
_MOST_CHARACTERS = 64 << 20
_DEADLINE: ContextVar[float] = ContextVar("deadline of the rendering in this thread")


class ChatTemplates:
    """The chat templates of a model."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Takes the templates.

        Args:
            sources: name -> Jinja source; empty for a model without one.
            special_tokens: by their names in templates, such as bos_token.
        """
        self._templates = {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}

    def render(self, chat: Chat) -> str:
        """Writes a chat like `AutoTokenizer.apply_chat_template`.

        Raises:
            ChatError: there is no template, it refuses the chat, or it would leave out a part of a message.
            ToolsNotSupported: it would ignore the tools.
        """
        template = self.of(chat)
        try:
            if chat.tools is not None and not template.reads_tools:
                raise ToolsNotSupported(
                    "the chat template ignores tools, so the model would never see them: leave them out and describe "
                    "them in a message, or use a model that was trained to call tools"
                )
            for number, message in enumerate(chat.messages):
                if (field := ignored_field(message)) is not None and not template.reads_field(field):
                    place = f"messages.{number}.{field}"
                    raise ChatError(f"{place} is not read by the chat template: write it into the content", place)
            messages = list(map(_in_parts, chat.messages)) if template.takes_parts else chat.messages
            return template.render(messages, chat.tools, chat.add_generation_prompt, chat.variables or {})
        except ChatError:
            raise
        except _ERRORS as error:
            raise ChatError(f"the model's chat template does not accept these messages: {error}") from None

    def of(self, chat: Chat) -> "ChatTemplate":
        """Returns the template for this chat: some models have another one for chats with tools."""
        names = ("tool_use", "default") if chat.tools is not None else ("default",)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is None:
            raise ChatError(
                "the model has no chat template: use an instruction-tuned model, or texts: a prompt to "
                "/v1/completions, rows with prompt and completion"
            )
        return found

    @cached_property
    def after_answer(self) -> str | None:
        """The text that the template writes after an answer that ends the chat; None if it takes no plain chat."""
        return self._written_after(Chat(_PROBED, add_generation_prompt=False))

    @cached_property
    def after_every_answer(self) -> str:
        """The text that the template writes after every answer, the last or not."""
        longer = Chat([*_PROBED, _PROBED[0]], add_generation_prompt=False)
        pairs = zip(self.after_answer or "", self._written_after(longer) or "", strict=False)
        return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _written_after(self, chat: Chat) -> str | None:
        try:
            _, probe, after = self.render(chat).rpartition(_PROBE)
        except ChatError:
            return None
        return after if probe else None


_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a template causes by a message that it does not accept."""

_PROBED: Sequence[Message] = ({"role": "user", "content": "asked"}, {"role": "assistant", "content": _PROBE})


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, JsonValue],
    ) -> str:
        """Raises any exception that the template causes; jinja2.TemplateError if it refuses the messages itself, or
        takes too long."""
        _DEADLINE.set(time.monotonic() + _RENDER_SECONDS)
        pieces = self._compiled.generate(
            messages=[_normalized(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )
        text, num_characters = [], 0
        for piece in pieces:
            text.append(piece)
            num_characters += len(piece)
            if num_characters > _MOST_CHARACTERS:
                raise TemplateError(f"it writes more than {_MOST_CHARACTERS} characters: send fewer messages")
        return "".join(text)

    @cached_property
    def reads_tools(self) -> bool:
        """True if the template uses `tools`. Raises TemplateError if the source cannot be parsed."""
        names = self._parsed.find_all(nodes.Name)
        return any(name.name == "tools" and name.ctx == "load" for name in names)

    def reads_field(self, name: str) -> bool:
        """Returns whether the template reads a field of messages. Raises TemplateError if it cannot be parsed."""
        return name in self._fields

    @cached_property
    def takes_parts(self) -> bool:
        """True if the template reads contents only as lists of parts, as those of some models of images do."""
        return not self._writes(_PROBED) and self._writes(list(map(_in_parts, _PROBED)))

    def _writes(self, probed: Sequence[Message]) -> bool:
        try:
            return _PROBE in self.render(probed, None, False, {})
        except _ERRORS:
            return False

    @cached_property
    def _fields(self) -> frozenset[str]:
        constants = {node.value for node in self._parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        return frozenset(constants | {node.attr for node in self._parsed.find_all(nodes.Getattr)})

    @cached_property
    def _parsed(self) -> nodes.Template:
        return _environment().parse(self._source)

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self._source)


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _normalized(message: Message) -> dict[str, JsonValue]:
    """Drops nulls, which many templates would print, and gives reasoning both names that templates read."""
    given: dict[str, JsonValue] = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Environment(ImmutableSandboxedEnvironment):
    """Checks the time in every round of a loop."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check).set_lineno(loop.lineno))
        return tree

    @staticmethod
    def check_time() -> None:
        if time.monotonic() > _DEADLINE.get():
            raise TemplateError(f"it takes longer than {_RENDER_SECONDS:g} s: send fewer messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    provided: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    environment.globals.update(provided)
    return environment


class _Generation(Extension):
    """Passes `{% generation %}` blocks through. They mark assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dictionary:
    """A `dict` without attributes that would let a template leave the sandbox."""

    def __call__(self, *items: Iterable[tuple[str, object]], **named: object) -> dict[str, object]:
        return dict(*items, **named)

    def fromkeys(self, keys: Iterable[str], value: object = None) -> dict[str, object]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A jinja2 namespace that refuses names with a leading underscore, which would reach the interpreter."""

    def __init__(*given: object, **named: object) -> None:
        # `self` is not named, so that a template may have an attribute of this name.
        self, *attributes = given
        values = dict(*attributes, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)  # pyright: ignore[reportArgumentType]

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} on a namespace: names may not begin with _")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
