"""The reference of balance between experts: what transformers' routers choose, and the metrics as the SDK describes
them."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn


@torch.no_grad()
def tokens_by_expert(model: nn.Module, sequences: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Returns how many tokens each expert of each layer gets, one sequence at a time."""
    layers = [each for each in model.modules() if type(each).__name__.endswith("Experts")]
    counts = [np.zeros(int(each.num_experts), np.int64) for each in layers]
    for layer, of_layer in zip(layers, counts, strict=True):

        def count(_: object, inputs: tuple[Tensor, ...], of_layer: np.ndarray = of_layer) -> None:
            if len(inputs) > 1:
                of_layer += np.bincount(inputs[1].flatten().numpy(), minlength=len(of_layer))
            else:  # Llama 4 runs all experts on all tokens, times zero if not chosen
                of_layer += inputs[0].unflatten(0, (len(of_layer), -1)).any(-1).sum(1).numpy()

        layer.register_forward_pre_hook(count)
    for tokens in sequences:
        model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    return counts


def balance_metrics(counts: Sequence[np.ndarray]) -> dict[str, float]:
    of_layers = []
    for tokens in counts:
        balance = tokens.sum() / len(tokens)
        with_tokens, above = sum(tokens > 0) / len(tokens), sum(tokens > balance) / len(tokens)
        of_layers.append((with_tokens, above, (max(tokens) - balance) / balance, (min(tokens) - balance) / balance))
    with_tokens, above, most, least = zip(*of_layers, strict=True)
    return {
        "e_frac_with_tokens:mean": float(np.mean(with_tokens)),
        "e_frac_oversubscribed:mean": float(np.mean(above)),
        "e_max_violation:mean": float(np.mean(most)),
        "e_max_violation:max": float(max(most)),
        "e_min_violation:mean": float(np.mean(least)),
    }


def balance_of(metrics: dict[str, float]) -> dict[str, float]:
    """Returns those of an operation's metrics."""
    return {name: value for name, value in metrics.items() if name.startswith("e_")}
