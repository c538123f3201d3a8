"""Requests that are almost valid: the examples of the API, with unexpected values in one place or another."""

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import zstandard
from trainhouse.schemas.codec import encode_forward_backward_request
from trainhouse.schemas.training import Datum, ForwardBackwardRequest

from .full_examples import ADAPTER_CONFIG, adapter, full_examples

NUMBERS = (
    *("0", "-0", "-0.0", "-1", "1", "0.5", "1e400", "-1e400", "1e-400", "1e308", "NaN", "Infinity", "-Infinity"),
    *(str(2**31), str(2**32), str(2**53 + 1), str(2**63 - 1), str(2**63), str(-(2**63) - 1), str(2**64)),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "1." + "0" * 400 + "1", "01", "1e", "0x10"),
)
TEXTS = (
    *(
        r'"\ud800"',
        r'"\udfff"',
        r'"a\ud83d"',
        r'"\ude00\ud83d"',
        r'"\u0000"',
        r'"a\u0000b"',
        r'"\ud83d\ude00"',
        r'"\\ud800"',
    ),
    *(
        '""',
        '" "',
        '"é"',
        '"\u202e"',
        '"../../etc/passwd"',
        '"tinker://"',
        '"tinker://a/weights/b"',
        '"%s%n"',
        r'"\u001b[31m"',
    ),
    *(
        '"' + "a" * 300 + '"',
        '"' + "a" * 70_000 + '"',
        '"' + "é" * 5000 + '"',
        '"' + r"\n" * 2000 + '"',
        '"NaN"',
        '"1"',
        '"null"',
    ),
)
OTHERS = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '[{"": {}}]', '{"": ""}', '{"a": 1, "a": 2}'),
    *("[" * 90 + "]" * 90, "[" * 2000 + "]" * 2000, '{"a":' * 90 + "1" + "}" * 90, '{"a":' * 2000 + "1" + "}" * 2000),
    *("[" + "1," * 3000 + "1]", "[" + '"a",' * 3000 + '"a"]', "{" + ",".join(f'"{n}":{n}' for n in range(2000)) + "}"),
    *(
        '{"type": "image"}',
        '{"data": [1], "dtype": "int64", "shape": [-1]}',
        "[1, 2, 3]",
        '{"chunks": []}',
        "}",
        "[",
        ",",
        "",
    ),
)
TYPES = (
    *(
        "application/json",
        "application/json; charset=utf-16",
        "text/plain",
        "",
        "application/x-protobuf",
        "multipart/form-data",
    ),
    *("application/x-www-form-urlencoded", "application/octet-stream", "application/vnd.x+json", "a/b/c", "é".encode()),
)
ENCODINGS = ("zstd", "identity", "gzip", "zstd, zstd", "", "é".encode())
IN_ADDRESSES = (
    *("%00", "%ed%a0%80", "%ff", "a%2fb", "..", "%2e%2e%2f", "a" * 300, "a" * 5000, "%0d%0aX: y", "é", "-1", "1e400"),
    *("9" * 400, "NaN", "+", "%", "%%", "%u0000", " ", ":", "tinker:%2f%2f"),
)
HEADERS = (
    "X-Idempotency-Key",
    "X-Tinker-Weights-Access-Token",
    "Prefer",
    "Accept",
    "Content-Length-",
    "Host-",
    "X-Forwarded-For",
    "Authorization",
    "Cookie",
    "Last-Event-ID",
    "Origin",
    "Range",
    "Traceparent",
)
HEADER_VALUES = (
    *(
        b"",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"a" * 300,
        b"a" * 5000,
        b"wait=1",
        b'wait="99999999999"',
        b"wait=1e400",
        b"*/*;q=nan",
    ),
    *(b"application/x-protobuf", b"tml-alice", b"\x01", b"=", b"1" * 400),
)


@dataclass(frozen=True)
class Input:
    """target: path and query, percent-encoded."""

    method: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str | bytes] = field(default_factory=dict)


class Extremes:
    """Draws requests to the routes of a server.

    document: the OpenAPI document.
    things: names of existing things, by the names that paths and bodies have for them.
    """

    def __init__(self, document: dict[str, Any], things: Mapping[str, object], seed: int) -> None:
        self._random = random.Random(seed)
        self._things = {**things, "config_bytes": len(ADAPTER_CONFIG)}
        paths: dict[str, dict[str, Any]] = document["paths"]
        self._routes = [(method, path, one) for path, methods in paths.items() for method, one in methods.items()]
        self._full = [
            (method, path, {"requestBody": {"content": {"application/json": {"example": body}}}})
            for method, path, body in full_examples()
        ]

    def next(self) -> Input:
        method, path, operation = self._random.choice(self._full if self._is_rare(3) else self._routes)
        headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        body = b""
        content = operation.get("requestBody", {}).get("content", {})
        if content or self._is_rare(20):
            body = self._body(path, content)
        if self._is_rare(6):
            headers["Content-Type"] = self._random.choice(TYPES)
        if self._is_rare(12):
            headers["Content-Encoding"] = self._random.choice(ENCODINGS)
            body = zstandard.compress(body) if self._is_rare(2) else body
        if self._is_rare(4):
            headers[self._random.choice(HEADERS)] = self._random.choice(HEADER_VALUES)
        if self._is_rare(40):
            method = self._random.choice(["get", "head", "post", "put", "delete", "options", "patch", "trace"])
        if "application/x-protobuf" in content and self._is_rare(2):
            headers["Content-Type"], body = "application/x-protobuf", self._protobuf()
        return Input(method.upper(), self._target(path, operation), body, headers)

    def _is_rare(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    def _target(self, path: str, operation: dict[str, Any]) -> str:
        query = []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            odd = self._random.choice(IN_ADDRESSES)
            value = odd if self._is_rare(3) else quote(str(self._things.get(name, "a")), safe="")
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", value)
            elif parameter["in"] == "query" and self._is_rare(2):
                query.append(f"{name}={value}")
        if self._is_rare(20):
            query.append(self._random.choice(IN_ADDRESSES))
        return quote(path + ("?" + "&".join(query) if query else ""), safe="%/:?&=+.,~-_*'()!$;@")

    def _body(self, path: str, content: dict[str, Any]) -> bytes:
        if path.endswith("/import_weights"):
            return ADAPTER_CONFIG + self._adapter()
        example = content.get("application/json", {}).get("example", {})
        body = self._json(example)
        match self._random.randrange(12):
            case 0:
                return body[: self._random.randrange(len(body) + 1)]
            case 1:
                return self._damaged(body)
            case 2:
                return self._random.randbytes(self._random.choice([0, 1, 10, 1000, 100_000]))
            case 3:
                return self._random.choice(OTHERS).encode("utf-8", "surrogatepass")
            case 4:
                return body.decode(errors="replace").encode(
                    self._random.choice(["utf-16", "utf-32", "latin-1"]), "replace"
                )
            case _:
                return body

    def _json(self, example: object) -> bytes:
        """Returns the example with names of existing things, and with raw pieces of JSON, valid or not, in a few
        places."""
        pieces: list[str] = []
        value = self._named(json.loads(json.dumps(example)))
        for _ in range(self._random.choice([0, 1, 1, 1, 2, 3])):
            value = self._spoiled(value, pieces)
        text = json.dumps(value)
        for index, piece in enumerate(pieces):
            text = text.replace(f'"@{index}@"', piece)
        return text.encode("utf-8", "surrogatepass")

    def _adapter(self) -> bytes:
        """Returns an adapter with an unexpected header, or with damage."""
        whole = adapter()
        num_bytes = int.from_bytes(whole[:8], "little")
        if self._is_rare(3):
            return self._damaged(whole)
        header = self._json(json.loads(whole[8 : 8 + num_bytes]))
        return len(header).to_bytes(8, "little") + header + whole[8 + num_bytes :]

    def _named(self, value: object) -> object:
        if isinstance(value, list):
            return [self._named(entry) for entry in value]
        if isinstance(value, dict):
            return {key: self._things.get(key, self._named(entry)) for key, entry in value.items()}
        return value

    def _spoiled(self, value: object, pieces: list[str]) -> object:
        """Returns the value with one place replaced by the mark of a piece, or with a field added or removed."""
        if isinstance(value, dict) and value and not self._is_rare(6):
            key = self._random.choice(list(value))
            match self._random.randrange(10):
                case 0:
                    return {other: entry for other, entry in value.items() if other != key}
                case 1:
                    return value | {
                        self._random.choice(["a", "", "\ud800", "\0", "type", key + "\udfff"]): self._piece(pieces)
                    }
                case _:
                    return value | {key: self._spoiled(value[key], pieces)}
        if isinstance(value, list) and value and not self._is_rare(4):
            index = self._random.randrange(len(value))
            return [*value[:index], self._spoiled(value[index], pieces), *value[index + 1 :]]
        return self._piece(pieces)

    def _piece(self, pieces: list[str]) -> str:
        pieces.append(self._random.choice(self._random.choice([NUMBERS, TEXTS, OTHERS])))
        return f"@{len(pieces) - 1}@"

    def _damaged(self, body: bytes) -> bytes:
        damaged = bytearray(body)
        for _ in range(self._random.randrange(1, 5)):
            place = self._random.randrange(len(damaged) + 1)
            damaged[place : place + self._random.randrange(4)] = self._random.randbytes(self._random.randrange(6))
        return bytes(damaged)

    def _protobuf(self) -> bytes:
        tokens = np.array([self._random.choice([5, 6, 0, -1, 511, 512, 2**31 - 1]) for _ in range(3)], np.int32)
        floats = np.array(
            [self._random.choice([0.0, -0.0, 1.0, 1e38, np.nan, np.inf, -np.inf]) for _ in range(3)], np.float32
        )
        inputs = {
            "target_tokens": np.array([6, 7, self._random.choice([8, -1, 2**63 - 1, -(2**63)])]),
            self._random.choice(["weights", "logprobs", "advantages", "", "a\0b", "é" * 100]): floats,
        }
        datum = Datum(tokens, inputs, feature_ref=self._random.choice([None, None, "a", "a\0", "../a"]))
        loss = self._random.choice(["cross_entropy", "ppo", "importance_sampling", "", "a\0", "é" * 1000])
        model_id = self._random.choice([str(self._things["model_id"]), "", "a\0", "none"])
        request = ForwardBackwardRequest(
            model_id,
            self._random.choice([0, 0, 1, 2**31 - 1]),
            (datum,) * self._random.choice([0, 1, 5]),
            loss,
            {"a": self._random.choice([0.0, np.nan, "b"])} if self._is_rare(5) else {},
            loss_weight=self._random.choice([1.0, 1.0, 0.0, -1.0, 1e300, float("nan"), float("inf")]),
        )
        body = encode_forward_backward_request(request)
        match self._random.randrange(5):
            case 0:
                return self._damaged(body)
            case 1:
                return self._random.randbytes(self._random.randrange(300))
            case 2:
                return body + struct.pack("<Q", self._random.getrandbits(64))
            case _:
                return body
