"""Captured features of a target's layers equal transformers' output_hidden_states, sequence by sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from trainhouse.workers.lora import LoraLayers
from trainhouse.workers.models.fused_decoder import EMBEDDING
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from transformers import AutoModelForCausalLM

from ...tiny import tiny_config
from ..adapted import Adapted, relative_error

NUM_LAYERS = 4
LAST = NUM_LAYERS - 1
FUSED_KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "cohere2")
UNFUSED_KIND = "cohere_compass"
KINDS = (*FUSED_KINDS, UNFUSED_KIND)
LENGTHS = [7, 5, 5, 1]


class Target:
    """A tiny model with random norms, run by us and by transformers."""

    def __init__(self, kind: str, directory: Path) -> None:
        torch.manual_seed(0)
        has_windows = kind in ("gemma3", "cohere2", "cohere_compass")
        windows = {"layer_types": ["sliding_attention", "full_attention"] * 2} if has_windows else {}
        config = tiny_config(kind, num_hidden_layers=NUM_LAYERS, **windows)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(directory)
        self.directory = directory
        self.base = Adapted(directory).base
        self.theirs: Any = model.eval()
        self.sequences = [torch.randint(0, 512, (length,)) for length in LENGTHS]

    def hidden_states(self, captured: dict[int, Tensor] | None, base: BaseModel | None = None) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        packing = Packing(pack_lengths(LENGTHS))
        return (base or self.base).hidden_states(torch.cat(self.sequences), positions, packing, captured=captured)

    def captured(self, *layers: int, base: BaseModel | None = None) -> dict[int, Tensor]:
        captured = {layer: torch.empty(0) for layer in layers}
        self.hidden_states(captured, base)
        return captured

    @torch.no_grad()
    def wanted(self, layer: int) -> Tensor:
        """Returns the output of a layer by its index; for the last one, before the final norm."""
        found, trunk = [], self.theirs.model
        for tokens in self.sequences:
            with final_norm_input(trunk) as last:
                states = trunk(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
            found.append((last[0] if layer == LAST else states[layer + 1])[0])
        return torch.cat(found)


@contextmanager
def final_norm_input(trunk: Any) -> Iterator[list[Tensor]]:
    """Yields the input of the final norm; transformers' last hidden state is its output."""
    found: list[Tensor] = []
    hook = trunk.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    yield found
    hook.remove()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {kind: Target(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Target:
    return targets[request.param]


@pytest.fixture(params=[False, True], ids=["without gradients", "with gradients"])
def _gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    """The two modes use different kernels."""
    with torch.set_grad_enabled(request.param):
        yield


def test_kinds_cover_the_fused_and_the_plain_forward(targets: dict[str, Target]) -> None:
    assert {kind for kind, target in targets.items() if target.base.runs_own_layers} == set(FUSED_KINDS)


@pytest.mark.usefixtures("_gradients")
def test_captured_layers_equal_transformers_hidden_states(target: Target) -> None:
    captured = target.captured(EMBEDDING, 0, 1, 2)
    assert captured.keys() == {EMBEDDING, 0, 1, 2}
    for layer, found in captured.items():
        assert found.shape == (sum(LENGTHS), target.base.config.hidden_size)
        assert relative_error(found, target.wanted(layer)) < 1e-5
        for other in {layer - 1, layer + 1} - {EMBEDDING - 1, LAST}:
            assert relative_error(found, target.wanted(other)) > 1e-2


@pytest.mark.usefixtures("_gradients")
def test_last_layer_is_captured_before_the_norm(target: Target) -> None:
    captured: dict[int, Tensor] = {LAST: torch.empty(0)}
    normed = target.hidden_states(captured)
    assert relative_error(captured[LAST], target.wanted(LAST)) < 1e-5
    assert relative_error(captured[LAST], normed) > 1e-2


@pytest.mark.usefixtures("_gradients")
def test_capture_does_not_change_the_output(target: Target) -> None:
    without = target.hidden_states(None)
    assert torch.equal(target.hidden_states({}), without)
    for layers in ((EMBEDDING,), (1,), (EMBEDDING, *range(NUM_LAYERS))):
        assert torch.equal(target.hidden_states({layer: torch.empty(0) for layer in layers}), without)


@pytest.mark.usefixtures("_gradients")
def test_captured_features_do_not_depend_on_other_captured_layers(target: Target) -> None:
    everything = target.captured(EMBEDDING, *range(NUM_LAYERS))
    for layer, found in everything.items():
        (alone,) = target.captured(layer).values()
        assert torch.equal(alone, found)


@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_recomputed_and_offloaded_layers_are_captured_the_same(
    kind: str, activations: Literal["recompute", "offload"], targets: dict[str, Target]
) -> None:
    target = targets[kind]
    served = ServedModel("tiny", str(target.directory))
    base = BaseModel(WorkerConfig(served, device="cpu", dtype="float32", activations=activations))
    LoraLayers(base, max_rank=8)
    captured = target.captured(EMBEDDING, 1, LAST, base=base)
    # Autograd sees a recomputed layer as one function.
    added: Any = captured[1].grad_fn
    assert "_Checkpointed" in type(added.next_functions[0][0]).__name__
    for layer, found in captured.items():
        assert relative_error(found.detach(), target.wanted(layer)) < 1e-5


@pytest.mark.parametrize("kind", ["llama", UNFUSED_KIND])
def test_bfloat16_capture_equals_transformers_up_to_rounding(kind: str, targets: dict[str, Target]) -> None:
    target = targets[kind]
    base = Adapted(target.directory, dtype="bfloat16").base
    for layer, found in target.captured(EMBEDDING, 0, 1, 2, base=base).items():
        assert found.dtype == torch.bfloat16
        error = relative_error(found.float(), target.wanted(layer))
        assert 1e-4 < error < 2e-2 < relative_error(found.float() * 1.04, target.wanted(layer))
