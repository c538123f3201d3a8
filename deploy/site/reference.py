"""Writes the parts of the reference that the code knows: options, commands, endpoints, and the Python client."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import trainhouse
from trainhouse.server.cli.commands import app as command_line
from trainhouse.server.config.option import Option
from trainhouse.server.config.server_config import OPTIONS, SECTION_OF, SECTIONS, ServerConfig
from trainhouse.server.serving.app import create_app
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel
from typer.main import get_command


def configuration() -> str:
    parts = []
    for section, own in groupby(OPTIONS.values(), lambda option: SECTION_OF[option.name]):
        rows = [[f"`{each.flag}`", f"`{each.name}`", _default(each), _cell(_meaning(each))] for each in own]
        purpose = (inspect.getdoc(SECTIONS[section]) or "").partition("\n")[0]
        parts.append(f"## `[{section}]`\n\n{purpose}\n\n{_table(['flag', 'key', 'default', 'meaning'], rows)}")
    return "\n".join(parts)


def _default(option: Option) -> str:
    return f"`{option.shown_default}`" if option.shown_default else ""


def _meaning(option: Option) -> str:
    """The help, what values it takes, and with which other options it has an effect."""
    meaning = option.help
    if option.choices:
        meaning += f". One of {', '.join(option.choices)}"
    elif option.expected:
        meaning += f". Values: {option.expected}"
    if option.only_with is not None:
        meaning += f". Only with `{option.only_with[0]} = {option.only_with[1]}`"
    if option.not_with is not None:
        meaning += f". Not with `{option.not_with[0]} = {option.not_with[1]}`"
    return meaning


def commands() -> str:
    return "\n".join(_command("trainhouse", get_command(command_line), None, 2))


def _command(name: str, command: Any, parent: Any, level: int) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    if level > 2:
        yield f"{'#' * level} {name}\n\n```text\n{command.get_help(context)}\n```\n"
    for each in getattr(command, "commands", {}):
        _, found, _ = command.resolve_command(context, [each])
        yield from _command(each if parent is None else f"{name} {each}", found, context, level + 1)


def client() -> str:
    parts = []
    for name in sorted(trainhouse.__all__, key=lambda each: (each != "ServiceClient", _is_error(each), each)):
        kind = getattr(trainhouse, name)
        parts.append(f"## {name}\n\n{_prose(inspect.getdoc(kind) or '')}")
        for method, function in _methods(kind):
            described = _prose(function.__doc__ or "")
            parts.append(f"### {name}.{method}\n\n```text\n{_signature(method, function)}\n```\n\n{described}")
    return "\n\n".join(parts)


def _is_error(name: str) -> bool:
    return name.endswith("Error")


def _methods(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yields the public methods with docstrings; x_async stands for x."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function) and function.__module__.startswith("trainhouse"):
            if name.endswith("_async") and name.removesuffix("_async") in vars(kind):
                continue
            yield name, function


def _signature(name: str, function: Any) -> str:
    function = inspect.unwrap(function)
    parameters = [
        str(each) for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")
    ]
    separator = ",\n    " if len(", ".join(parameters)) > 90 else ", "
    joined = separator.join(parameters)
    return f"{name}(\n    {joined},\n)" if "\n" in separator else f"{name}({joined})"


def _prose(docstring: str) -> str:
    """Makes lists of Args, Raises and the like."""
    lines, listed = [], False
    for line in inspect.cleandoc(docstring).splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            lines += ["", f"**{line.removesuffix(':')}**", ""]
            listed = True
        elif listed and (entry := re.fullmatch(r"    ([\w, *.]+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif listed and line and not line.startswith(" "):
            lines += ["", line]
            listed = False
        else:
            lines.append(line)
    return "\n".join(lines)


def endpoints() -> str:
    config = ServerConfig.of(base_models=(ServedModel("model", "/"),))
    document = create_app(config, WorkerDispatch(config.dispatch_config())).openapi()
    objects = dict(document["components"]["schemas"])
    routes = [(path, method, route) for path, each in document["paths"].items() for method, route in each.items()]
    parts = [_endpoint(path, method, route, objects) for path, method, route in routes]
    shown = [_object(name, schema) for name, schema in sorted(objects.items()) if "properties" in schema]
    return "\n".join(["## Requests\n", *parts, "## Objects\n", *shown])


def _endpoint(path: str, method: str, route: Mapping[str, Any], objects: dict[str, Any]) -> str:
    """Returns the section of an endpoint. The objects of its body are added to `objects`."""
    parts = [f"### {method.upper()} {path}\n", _prose(route.get("description") or route.get("summary", "")) + "\n"]
    rows = [
        [f"`{each['name']}`", each["in"], _type(each["schema"]), _cell(each.get("description", ""))]
        for each in route.get("parameters", ())
    ]
    if rows:
        parts.append(_table(["parameter", "in", "type", "meaning"], rows))
    for kind, content in route.get("requestBody", {}).get("content", {}).items():
        body = _named(content.get("schema", {}), f"{path.rpartition('/')[2].title().replace('_', '')}Body", objects)
        parts.append(f"Body (`{kind}`): {_type(body)}\n")
        if "example" in content:
            parts.append(f"```json\n{json.dumps(content['example'])}\n```\n")
    for status, answer in route.get("responses", {}).items():
        for kind, content in answer.get("content", {}).items():
            if status.startswith("2") and content.get("schema"):
                parts.append(f"Answer (`{kind}`): {_type(content['schema'])}\n")
    return "\n".join(parts)


def _named(schema: Any, name: str, objects: dict[str, Any]) -> Any:
    """Returns the schema with references in place of the objects that it contains, which are added to `objects`."""
    if isinstance(schema, list):
        return [_named(each, name, objects) for each in schema]
    if not isinstance(schema, dict) or "$ref" in schema:
        return schema
    named = {key: _named(each, key.title().replace("_", ""), objects) for key, each in schema.items()}
    if "properties" in schema:
        title = schema.get("title", name)
        objects.setdefault(title, named)
        return {"$ref": f"#/{title}"}
    return named


def _object(name: str, schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = [
        [f"`{field}`", _type(of), "required" if field in needed else _value(of), _cell(of.get("description", ""))]
        for field, of in schema["properties"].items()
    ]
    table = _table(["field", "type", "default", "meaning"], rows)
    return f"### {name}\n\n{_prose(schema.get('description', ''))}\n\n{table}"


def _value(field: Mapping[str, Any]) -> str:
    return "" if field.get("default") is None else _cell(f"`{field['default']}`")


def _type(schema: Mapping[str, Any]) -> str:
    """The type in words, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']!r}`"
    if "enum" in schema:
        return ", ".join(f"`{value!r}`" for value in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]}" for key, word in LIMITS.items() if key in schema]
    return " ".join([schema.get("type", "any"), *limits])


LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "minLength": "from length",
    "maxLength": "to length",
}


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PARTS = {each.__name__: each for each in (configuration, commands, client, endpoints)}
"""The parts by name: a page asks for one with `<!-- generated: NAME -->`."""
