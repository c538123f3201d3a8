"""`vllm serve` with an endpoint that replaces the weights of the base model or of the draft: `python serve.py serve
MODEL --middleware __main__.WeightsEndpoint --worker-extension-cls __main__.WeightsLoader ...`.

A program for a Python that has vLLM, and has nothing of ours. vLLM's own endpoints for this ask for no key, and lose
their way among layers with adapters.
"""

# pyright: reportMissingImports=false

import asyncio
import os
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest.mock import patch

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

    def replace_draft(self, path: str) -> None:
        """Loads the weights of a draft of the same shape as that with which vLLM has started."""
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        draft = self.model_runner.drafter.model
        config = copy(self.vllm_config.speculative_config.draft_model_config)
        config.model = path
        weights = get_model_loader(self.vllm_config.load_config).get_all_weights(config, draft)
        with _without_shared(draft), _context_projections(draft.model):
            initialize_layerwise_reload(draft)
            draft.load_weights(weights)
            finalize_layerwise_reload(draft, config)


@contextmanager
def _without_shared(draft: Any) -> Iterator[None]:
    """Takes the target's embeddings and output head out of the draft, which has no weights for them."""
    from torch import nn

    loaded_from_file = {"lm_head": "has_own_lm_head", "embed_tokens": "has_own_embed_tokens"}
    places = [
        (parent, name, getattr(parent, name))
        for parent, name in ((draft, "lm_head"), (draft.model, "embed_tokens"))
        if not getattr(draft, loaded_from_file[name], False)
    ]
    for parent, name, _ in places:
        setattr(parent, name, nn.Identity())
    try:
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)


@contextmanager
def _context_projections(layers: Any) -> Iterator[None]:
    """Updates the copies that dflash has of its weights for the context.

    vLLM makes them from weights that it has not yet packed, which a reload has only between its steps.
    """
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if not hasattr(layers, "_build_fused_kv_buffers"):
        yield
        return
    attentions = {layer.self_attn.qkv_proj: layer.self_attn for layer in layers.layers}
    pack, keys_and_values = UnquantizedLinearMethod.process_weights_after_loading, dict[Any, torch.Tensor]()

    def pack_after_copy(method: Any, layer: Any) -> None:
        if layer in attentions:
            keys_and_values[layer] = layer.weight[attentions[layer].q_size :].clone()
        pack(method, layer)

    with (
        patch.object(UnquantizedLinearMethod, "process_weights_after_loading", pack_after_copy),
        patch.object(layers, "_build_fused_kv_buffers", lambda: None),
    ):
        yield
    layers._fused_kv_weight.copy_(torch.cat([keys_and_values[layer] for layer in attentions]))
    layers._k_norm_weights.copy_(torch.stack([each.k_norm.weight for each in attentions.values()]))


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


def _keep_drafts_apart() -> None:
    """Changes what vLLM's drafts share with the target.

    Its embeddings: without the layer that adds adapters to them, which would look for the draft's tokens among those of
    the target's last pass; no adapter of ours has embeddings. Its output head: not if the draft has its own, with which
    a new draft starts as a copy of the target's, because the next draft has another.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share_embeddings = SpecDecodeBaseProposer._maybe_share_embeddings
    share_head = SpecDecodeBaseProposer._maybe_share_lm_head

    def share_plain_embeddings(proposer: Any, target: Any) -> None:
        share_embeddings(proposer, target)
        layers = proposer.model.model
        layers.embed_tokens = getattr(layers.embed_tokens, "base_layer", layers.embed_tokens)

    def share_missing_head(proposer: Any, target: Any) -> None:
        if not getattr(proposer.model, "has_own_lm_head", False):
            share_head(proposer, target)

    SpecDecodeBaseProposer._maybe_share_embeddings = share_plain_embeddings
    SpecDecodeBaseProposer._maybe_share_lm_head = share_missing_head


# Processes that vLLM starts import this file under the second name.
if __name__ in ("__main__", "__mp_main__"):
    _keep_drafts_apart()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
