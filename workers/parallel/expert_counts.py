"""Counts how many tokens each expert of each sparse layer gets, separately for each segment of a micro-batch."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor


class ExpertCounts:
    """The counts of one micro-batch, for the tokens that this rank runs. They stay on the device until all layers
    ran."""

    def __init__(self, own: slice, stops: Sequence[int], device: torch.device) -> None:
        """own: the tokens that this rank runs. stops: the first token after each segment. Segments are neighbours, and
        the first begins at token 0."""
        tokens = torch.arange(own.start, own.stop, own.step or 1, device=device)
        bounds = torch.tensor(stops).to(device, non_blocking=True)
        self._segments = torch.bucketize(tokens, bounds, right=True).unsqueeze(1)
        self._num_rows = len(stops) + 1  # the last is the padding's
        self._of_layers: dict[Hashable, Tensor] = {}

    def add(self, layer: Hashable, chosen: Tensor, num_experts: int) -> None:
        """Counts the experts `chosen` [tokens, experts of each]; not again when the layer runs again for its backward
        pass."""
        if layer in self._of_layers:
            return
        places = (self._segments * num_experts + chosen).flatten()
        # `bincount` would wait for the GPU.
        counts = places.new_zeros(self._num_rows * num_experts).scatter_add_(0, places, torch.ones_like(places))
        self._of_layers[layer] = counts.view(self._num_rows, num_experts)

    def by_segment(self) -> list[tuple[np.ndarray, ...]]:
        """Returns for each segment the counts of each layer, int64 [experts], in the order in which layers ran."""
        whole = torch.cat([each.flatten() for each in self._of_layers.values()]).cpu().numpy()
        ends = np.cumsum([each.numel() for each in self._of_layers.values()])[:-1]
        layers = [each.reshape(self._num_rows, -1) for each in np.split(whole, ends)]
        return [tuple(layer[segment] for layer in layers) for segment in range(self._num_rows - 1)]
