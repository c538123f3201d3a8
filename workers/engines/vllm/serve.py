"""`vllm serve` with an endpoint that replaces the base model's weights: `python serve.py serve MODEL --middleware
__main__.WeightsEndpoint --worker-extension-cls __main__.WeightsLoader ...`.

A program for a Python that has vLLM, and has nothing of ours. vLLM's own endpoints for this ask for no key, and lose
their way among layers with adapters.
"""

# pyright: reportMissingImports=false

import os
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/v1/trainhouse/weights"
_MOST_BYTES = 64 << 10


class WeightsEndpoint:
    """ASGI middleware: POST PATH with JSON {"path": a directory or hub id} loads the weights there in place.

    Requests that still run are aborted, and the prefix cache is emptied. After a failure the weights are undefined.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._authorization = f"Bearer {os.environ['VLLM_API_KEY']}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if request.method != "POST" or not secrets.compare_digest(given.encode(), self._authorization.encode()):
            return _error(401, "POST with the key is expected")
        if int(request.headers.get("content-length") or _MOST_BYTES + 1) > _MOST_BYTES:
            return _error(413, "the body is too large, or its length is missing")
        path = (await request.json())["path"]
        engine = request.app.state.engine_client
        try:
            await engine.pause_generation(mode="abort", clear_cache=True)
            await engine.collective_rpc("replace_weights", args=(path,))
            await engine.resume_generation()
        except Exception as error:
            traceback.print_exc()
            return _error(500, f"{type(error).__name__}: {error}")
        return JSONResponse({})


class WeightsLoader:
    """Is mixed into each worker of vLLM."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]

    def replace_weights(self, path: str) -> None:
        """Raises ValueError if the directory lacks any of the weights."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader import get_model_loader

        model = self.model_runner.get_model()
        with _without_adapters(model), _recorded_names(model) as loaded:
            self.reload_weights(weights_path=path)
            get_model_loader(self.vllm_config.load_config).track_weights_loading(model, loaded)
            # Output heads that share the embedding's weights would keep packed copies of the former ones on CPUs.
            for layer in model.modules():
                if isinstance(layer, VocabParallelEmbedding):
                    layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """Puts layers in the place of those that add adapters to them: loading finds no others by their names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    places = [(parent, name, layer) for parent in model.modules() for name, layer in parent.named_children()]
    adapted = [place for place in places if isinstance(place[2], BaseLayerWithLoRA)]
    of_experts = [layer for layer in model.modules() if getattr(layer, "lora_base_layer_prefix", "")]
    prefixes = [layer.lora_base_layer_prefix for layer in of_experts]
    for parent, name, layer in adapted:
        setattr(parent, name, layer.base_layer)
    for layer in of_experts:
        layer.lora_base_layer_prefix = ""
    try:
        yield
    finally:
        for parent, name, layer in adapted:
            setattr(parent, name, layer)
        for layer, prefix in zip(of_experts, prefixes, strict=True):
            layer.lora_base_layer_prefix = prefix


@contextmanager
def _recorded_names(model: Any) -> Iterator[set[str]]:
    """Yields a set, to which the names of the weights that the model loads are added."""
    names: set[str] = set()
    load = model.load_weights

    def recorded(weights: Any) -> set[str]:
        names.update(load(weights))
        return names

    model.load_weights = recorded
    try:
        yield names
    finally:
        del model.load_weights


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
