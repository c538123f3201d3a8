"""`vllm serve` with an endpoint that replaces the weights of the base model or of the draft: `python serve.py serve
MODEL --middleware __main__.WeightsEndpoint --worker-cls __main__.Worker ...`.

A program for a Python that has vLLM, and has nothing of ours. vLLM's own endpoints for this ask for no key, and lose
their way among layers with adapters.
"""

# pyright: reportMissingImports=false

import asyncio
import os
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/v1/trainhouse/weights"
_MOST_BYTES = 64 << 10


class WeightsEndpoint:
    """ASGI middleware: POST PATH with JSON {"path": a directory or hub id, "part": "model" or "draft"} loads the
    weights there in place.

    The prefix cache is emptied. Requests that still run are aborted; with "draft" they continue after it, and what they
    have in the cache is computed again. After a failure the weights are undefined.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._authorization = f"Bearer {os.environ['VLLM_API_KEY']}"
        self._lock = asyncio.Lock()

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
        body = await request.json()
        mode, method = ("keep", "replace_draft") if body["part"] == "draft" else ("abort", "replace_weights")
        engine = request.app.state.engine_client
        try:
            async with self._lock:
                await engine.pause_generation(mode=mode, clear_cache=True)
                await engine.collective_rpc(method, args=(body["path"],))
                await engine.resume_generation()
        except Exception as error:
            traceback.print_exc()
            return _error(500, f"{type(error).__name__}: {error}")
        return JSONResponse({})


class WeightsWorker:
    """Replaces weights in place. `__getattr__` makes vLLM's worker one of these."""

    model_runner: Any
    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """Loads the model and its draft.

        The draft shares the target's embeddings without the layer that adds adapters to them, which would look for the
        draft's tokens among those of the target's last pass; no adapter of ours has embeddings.
        """
        super().load_model(**options)  # pyright: ignore[reportAttributeAccessIssue]
        if (draft := self.model_runner.get_draft_model()) is not None:
            draft.model.embed_tokens = getattr(draft.model.embed_tokens, "base_layer", draft.model.embed_tokens)

    def replace_weights(self, path: str) -> None:
        """Raises ValueError if the directory lacks any of the weights."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader import get_model_loader

        model = self.model_runner.get_model()
        with _without_adapters(model):
            names = self._reload(model, self.vllm_config.model_config, path)
            get_model_loader(self.vllm_config.load_config).track_weights_loading(model, names)
            # Output heads that share the embedding's weights would keep packed copies of the former ones on CPUs.
            for layer in model.modules():
                if isinstance(layer, VocabParallelEmbedding):
                    layer.quant_method.process_weights_after_loading(layer)
        self.model_runner.reset_lora_state()

    def replace_draft(self, path: str) -> None:
        """Loads the weights of a draft of the same shape as that with which vLLM has started."""
        draft = self.model_runner.get_draft_model()
        with _context_projections(draft.model):
            self._reload(draft, self.vllm_config.speculative_config.draft_model_config, path)

    def _reload(self, model: Any, config: Any, path: str) -> Any:
        """Loads the weights in the directory, or of the hub id; returns what the model says of their names."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        config = copy(config)
        config.model, config.model_weights, config.revision = path, "", None
        weights = get_model_loader(self.vllm_config.load_config).get_all_weights(config, model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            names = model.load_weights(weights)
            finalize_layerwise_reload(model, config)
        return names


@cache
def __getattr__(name: str) -> Any:
    """Makes `Worker` where vLLM asks for it, in processes that run the model: its worker for the device, with ours."""
    if name != "Worker":
        raise AttributeError(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as DeviceWorker
    else:
        from vllm.v1.worker.gpu_worker import Worker as DeviceWorker
    return type("Worker", (WeightsWorker, DeviceWorker), {})


@contextmanager
def _context_projections(layers: Any) -> Iterator[None]:
    """Updates what dflash projects the context with: keys and values of all layers in one matrix.

    vLLM makes it from weights that it has not yet packed, which a reload has only between its steps.
    """
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if not hasattr(layers, "_build_fused_kv_buffers"):
        yield
        return
    attentions = {layer.self_attn.qkv_proj: layer.self_attn for layer in layers.layers}
    methods = {layer: layer.quant_method for layer in attentions}
    keys_and_values = dict[Any, torch.Tensor]()

    class CopyThenPack(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            keys_and_values[layer] = layer.weight[attentions[layer].q_size :].clone()
            super().process_weights_after_loading(layer)

    for layer in attentions:
        layer.quant_method = CopyThenPack()
    try:
        yield
    finally:
        for layer, method in methods.items():
            layer.quant_method = method
    layers._build_fused_kv_buffers()
    layers._fused_kv_weight = torch.cat([keys_and_values[layer] for layer in attentions])


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


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
