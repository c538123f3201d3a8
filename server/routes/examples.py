"""Defines the example values in the OpenAPI document; a test sends them with real ids substituted."""

from typing import Annotated

from fastapi import Header, Path

from ...schemas.bounds import MAX_ID, MAX_PATH
from ...schemas.verbs import BASE_MODEL, MODEL_ID, NAME, SESSION_ID

SAMPLER_ID = f"{SESSION_ID}:sample:0"

SessionIdPath = Annotated[str, Path(max_length=MAX_ID, openapi_examples={"a session": {"value": SESSION_ID}})]
RunIdPath = Annotated[str, Path(max_length=MAX_ID, openapi_examples={"a model": {"value": MODEL_ID}})]
SamplerIdPath = Annotated[str, Path(max_length=MAX_ID, openapi_examples={"a sampler": {"value": SAMPLER_ID}})]
KindPath = Annotated[
    str,
    Path(
        max_length=MAX_ID,
        description="weights, sampler_weights or external_weights",
        openapi_examples={"saved by save_weights": {"value": "weights"}},
    ),
]
NamePath = Annotated[str, Path(max_length=MAX_ID, openapi_examples={"a checkpoint": {"value": NAME}})]
ModelPath = Annotated[str, Path(max_length=MAX_PATH, openapi_examples={"a base model": {"value": BASE_MODEL}})]
FilePath = Annotated[str, Path(max_length=MAX_ID, openapi_examples={"a file": {"value": "tokenizer.json"}})]
IDEMPOTENCY_KEY = Header(alias="X-Idempotency-Key", max_length=MAX_ID)
"""A retry of a request carries the same key."""
