"""Renders chats with a model's Jinja template, exactly as transformers does.

What templates can see and do follows `transformers.utils.chat_template_utils`. Importing that would load torch, so this
is a copy, and a test compares the two.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from pydantic import JsonValue

Message = Mapping[str, JsonValue]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template.

    special_tokens: by their names in templates, such as bos_token.
    """

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
        """Raises any exception that the template causes; jinja2.TemplateError if it refuses the messages itself."""
        return self._compiled.render(
            messages=[_normalized(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    @cached_property
    def reads_tools(self) -> bool:
        """True if the template uses `tools`. Raises TemplateError if the source cannot be parsed."""
        names = _environment().parse(self._source).find_all(nodes.Name)
        return any(name.name == "tools" and name.ctx == "load" for name in names)

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self._source)


def _normalized(message: Message) -> dict[str, JsonValue]:
    """Drops nulls, which many templates would print, and gives reasoning both names that templates read."""
    given: dict[str, JsonValue] = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING_FIELDS if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
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
