"""Defines the example values in the OpenAPI document; a test sends them with real ids substituted."""

from typing import Annotated

from fastapi import Header, Path

from ...schemas.bounds import MAX_ID, MAX_PATH

SESSION_ID = "3f1c0f6a9d2b4e58"
MODEL_ID = f"{SESSION_ID}:train:0"
DRAFT_ID = f"{SESSION_ID}:train:1"
SAMPLER_ID = f"{SESSION_ID}:sample:0"
BASE_MODEL = "Qwen/Qwen3-0.6B"
NAME = "step-100"
CHECKPOINT = f"tinker://{MODEL_ID}/weights/{NAME}"

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
