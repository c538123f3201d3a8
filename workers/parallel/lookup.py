"""SharedEmbedding: an embedding of which each rank of a team keeps some rows."""

from torch import Tensor, nn

from .collectives import exchanged
from .mesh import Team


class SharedEmbedding:
    """Tokens go to the ranks that have their rows, and these come back; gradients by them go the same way. That takes
    less than to gather the embedding, of whose rows a pass wants few."""

    def __init__(self, embedding: nn.Embedding, team: Team) -> None:
        """embedding: its weights are this rank's rows, or all of them where it is gathered for as long as samples are
        drawn."""
        self._embedding, self._team = embedding, team
        self._num_rows = len(embedding.weight)
        if embedding.padding_idx is not None:
            # Of a token whose row is never trained.
            rank, row = divmod(embedding.padding_idx, self._num_rows)
            embedding.padding_idx = row if rank == team.index else None

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [n], any number -> [n, hidden]. Of all ranks of the team at once, unless it is gathered."""
        if len(self._embedding.weight) > self._num_rows:
            return self._embedding(tokens)
        by_rank, order = tokens.sort(stable=True)
        num_wanted = (by_rank // self._num_rows).bincount(minlength=self._team.size)
        sent, received = num_wanted.tolist(), self._team.exchanged(num_wanted).tolist()
        wanted = self._team.exchanged(by_rank % self._num_rows, sent, received)
        rows = exchanged(self._embedding(wanted), self._team, received, sent)
        return rows.index_select(0, order.argsort())
