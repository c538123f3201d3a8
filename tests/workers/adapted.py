"""Builds tiny base models with adapters, and the same adapters in peft."""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import linear
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.checkpoint import TrainedState, save
from trainhouse.workers.lora import Adapter, LoraLayers, Segment
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.linear import soft_capped
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.registry.model_registry import ModelRegistry
from trainhouse.workers.state.trainable import Trainable
from transformers import AutoModelForCausalLM

Dtype = Literal["float32", "bfloat16"]

LENGTHS = [7, 5, 5]

SIZES = {"micro_batch_tokens": 4096, "prefill_chunk_tokens": 512}
"""Options of a worker that has decided what they leave to it, on a CPU."""


def new_adapter(layers: LoraLayers, lora: LoraConfig) -> Adapter:
    """Returns an initialized adapter without an id."""
    adapter = layers.build(lora)
    adapter.initialize()
    return adapter


def create_adapter(models: ModelRegistry, adapter_id: str, lora: LoraConfig) -> Adapter:
    """Returns a new, initialized adapter."""
    return _stored(models, adapter_id, models.build_initialized(lora))


def copy_adapter(models: ModelRegistry, adapter_id: str, copy_id: str) -> Adapter:
    """Copies the adapter's current weights to another id."""
    return _stored(models, copy_id, models.copy_weights(adapter_id))


def _stored(models: ModelRegistry, adapter_id: str, model: Trainable) -> Adapter:
    stored = models.put(adapter_id, model)
    assert isinstance(stored, Adapter)
    return stored


class Adapted:
    """A base model with its adapters, which runs packed sequences like the worker."""

    def __init__(self, directory: Path, dtype: Dtype = "float32", max_rank: int = 64) -> None:
        self.directory = directory
        self.base = BaseModel(WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", dtype=dtype))
        self.lora = LoraLayers(self.base, max_rank)
        self.models = ModelRegistry(self.base, self.lora)

    def create(self, adapter_id: str, **lora: object) -> Adapter:
        """Creates an adapter whose weights are random, B included."""
        adapter = create_adapter(self.models, adapter_id, LoraConfig.model_validate({"rank": 4, "seed": 1} | lora))
        generator = torch.Generator().manual_seed(len(adapter_id) + adapter.lora.rank)
        for pair in adapter.pairs.values():
            pair.a.copy_(torch.randn(pair.a.shape, generator=generator) * 0.1)
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.1)
        return adapter

    def hidden(self, sequences: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
        lengths = [len(sequence) for sequence in sequences]
        positions = torch.cat([torch.arange(length) for length in lengths])
        with self.lora.applied(segments):
            return self.base.hidden_states(torch.cat(list(sequences)), positions, Packing(pack_lengths(lengths)))

    def logits(self, sequences: Sequence[Tensor], adapter: Adapter | None) -> Tensor:
        """Returns the logits of all sequences under one adapter.

        Backward adds the gradient of an output head pair to the adapter's scratch.
        """
        num_tokens = sum(len(sequence) for sequence in sequences)
        hidden = self.hidden(sequences, [Segment(0, num_tokens, adapter)])
        logits = linear(hidden, self.base.unembedding)
        if adapter is None or (pair := adapter.unembed) is None:
            return soft_capped(logits, self.base.logit_cap)
        a, b = pair.a.clone().requires_grad_(), pair.b.clone().requires_grad_()
        a_grad, b_grad = pair_gradients(adapter, adapter.unembed_name)
        a.register_hook(a_grad.add_)
        b.register_hook(b_grad.add_)
        return soft_capped(logits + pair.scale * (hidden @ a.t()) @ b.t(), self.base.logit_cap)


def pair_gradients(adapter: Adapter, name: str) -> tuple[Tensor, Tensor]:
    """Returns the gradients of A [rank, in] and B [out, rank] of a target in this thread's lane."""
    a, b_t = adapter.gradients.of_lane().views[name]
    return a, b_t.t()


def sequences(lengths: Sequence[int] = LENGTHS, vocab_size: int = 512) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


def probe(logits: Tensor) -> Tensor:
    """Returns fixed random weights, whose product with the logits is a loss with a gradient for every parameter."""
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)) / logits.shape[-1]


def load_in_peft(directory: Path, adapter: Adapter) -> PeftModel:
    """Returns the base model of transformers with the same adapter in peft, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter.adapts_experts:
        return _loaded_in_peft(model, adapter)
    kinds = sorted({target.kind for target in adapter.targets})
    with warnings.catch_warnings():
        quieten_peft()
        tuned = get_peft_model(model, PeftConfig(r=adapter.lora.rank, lora_alpha=32, target_modules=kinds))
    parameters = peft_parameters(tuned)
    named = adapter.layout.named_views(adapter.weights)
    assert parameters.keys() == named.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(named[name])
    return tuned


def _loaded_in_peft(model: torch.nn.Module, adapter: Adapter) -> PeftModel:
    """Loads the adapter from a file, because peft lays out the pairs of experts differently."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        quieten_peft()
        save(TrainedState.without_gradients(adapter, Mesh(), optimizer=False), Path(directory), base_name="tiny")
        write_for_peft(Path(directory))
        return PeftModel.from_pretrained(model, directory, is_trainable=True)


def quieten_peft() -> None:
    """Ignores peft's expected warnings; call it inside `warnings.catch_warnings()`."""
    # A tied output head is adapted on one side only: that is what train_unembed means.
    warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    # peft looks for the rank of experts among modules, and then finds it among parameters.
    warnings.filterwarnings("ignore", message=".*did not match any targeted module.*gate_up_proj.*")


def peft_parameters(tuned: PeftModel) -> dict[str, torch.nn.Parameter]:
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in tuned.named_parameters()
        if parameter.requires_grad
    }


def peft_gradients(
    tuned: PeftModel,
    num_experts: int,
    linears: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    are_misread: bool = False,
    alternate: bool = False,
) -> dict[str, Tensor]:
    """Returns the gradients by the names of the adapter's matrices.

    Args:
        linears: names of an expert's gate, if any, up and down projections in files.
        are_misread: whether peft takes inputs of experts for outputs.
        alternate: whether rows of an expert's gate and up projection take turns.
    """
    gradients = {}
    for name, parameter in peft_parameters(tuned).items():
        assert parameter.grad is not None
        layer, experts, side = name.partition(".experts.")
        gradient = parameter.grad
        if experts and are_misread:
            side, gradient = _turned(side, gradient, num_experts)
        of_experts = _of_experts(layer, side, gradient, num_experts, linears, alternate) if experts else None
        gradients |= of_experts or {name: parameter.grad}
    return gradients


def _turned(side: str, gradient: Tensor, num_experts: int) -> tuple[str, Tensor]:
    """Returns the name and form of a gradient of stacked experts as if peft took inputs for inputs."""
    if side.endswith("lora_A.weight"):
        by_expert = gradient.unflatten(0, (num_experts, -1)).permute(2, 1, 0)
        return side.replace("lora_A", "lora_B"), by_expert.flatten(1)
    by_expert = gradient.unflatten(1, (-1, num_experts)).permute(2, 1, 0)
    return side.replace("lora_B", "lora_A"), by_expert.flatten(0, 1)


def stacked_gradients(
    of_each: Mapping[str, Tensor],
    num_experts: int,
    linears: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Tensor]:
    """Returns the gradients of an adapter whose experts share factors, given those of its copy with separate matrices.

    A shared matrix has the sum over the experts. linears: see `peft_gradients`.
    """
    gradients = {name: each for name, each in of_each.items() if ".experts." not in name}
    paths = {name.partition(".experts.")[0] for name in of_each.keys() - gradients.keys()}
    for path in paths:
        *before, _ = linears
        stacks, sides = (*("w1", "w3")[: len(before)], "w2"), (*["lora_A"] * len(before), "lora_B")
        for kind, stacked, shared in zip(linears, stacks, sides, strict=True):
            for side in ("lora_A", "lora_B"):
                every = torch.stack([of_each[f"{path}.experts.{i}.{kind}.{side}.weight"] for i in range(num_experts)])
                whole = every.sum(0, keepdim=True) if side == shared else every
                gradients[f"{path}.experts.{stacked}.{side}.weight"] = whole
    return gradients


def _of_experts(
    layer: str, side: str, gradient: Tensor, num: int, linears: Sequence[str], alternate: bool
) -> dict[str, Tensor]:
    """Splits the gradient of stacked experts into one per expert and projection.

    peft stores A as [experts * ranks, in] and B as [out, ranks * experts], for down_proj, or for gate and up together.
    The latter have twice as many ranks: first the gate's, then up's.
    """
    kinds = linears[:-1] if side.startswith("base_layer.") else linears[-1:]
    if side.endswith("lora_A.weight"):
        parts = [each.chunk(len(kinds)) for each in gradient.view(num, -1, gradient.shape[1])]
    else:
        of_each = gradient.view(len(gradient), -1, num).permute(2, 0, 1)
        num_kinds = len(kinds)
        rows = [
            [each[i::num_kinds] for i in range(num_kinds)] if alternate else each.chunk(num_kinds) for each in of_each
        ]
        parts = [[r.chunk(num_kinds, 1)[i] for i, r in enumerate(each)] for each in rows]
    side = side.removeprefix("base_layer.")
    return {
        f"{layer}.experts.{number}.{kind}.{side}": part
        for number, each in enumerate(parts)
        for kind, part in zip(kinds, each, strict=True)
    }


def peft_logits(tuned: torch.nn.Module, sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([tuned(input_ids=sequence.unsqueeze(0)).logits.squeeze(0) for sequence in sequences])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())
