"""Reads and writes the weights that workers of one base model send each other."""

import torch

from ..lora import Adapter
from ..parallel.mesh import Mesh
from ..protocol.calls import AdapterWeights
from ..registry.model_registry import ModelRegistry
from ..state.trainable import Trainable


def exported_weights(model: Trainable, mesh: Mesh) -> AdapterWeights | None:
    """Returns the model's weights as a whole: an adapter's on all ranks, full weights on the first only (else None)."""
    layout = model.layout
    put_together = layout.whole_vector if isinstance(model, Adapter) else layout.whole_on_first
    whole = put_together(model.weights, mesh)
    return None if whole is None else AdapterWeights(model.training, whole.cpu().numpy())


def import_weights(models: ModelRegistry, exported: AdapterWeights) -> Trainable:
    """Builds a model of the exported weights."""
    model = models.build(exported.training)
    overwrite_weights(model, exported)
    return model


def overwrite_weights(model: Trainable, exported: AdapterWeights) -> None:
    """Replaces the model's weights in place by exported ones of the same shape."""
    whole = model.layout.unsharded.named_views(torch.from_numpy(exported.weights))
    model.layout.copy_parts(model.weights, whole)
