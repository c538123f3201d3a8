"""An embedding whose rows are divided over the ranks of a team."""

from torch import Tensor, nn

from .collectives import all_to_all_rows
from .mesh import Team


class ShardedEmbedding:
    """Sends tokens to the ranks that have their rows, and gets the rows back; gradients travel the same way.

    This moves less data than gathering the embedding, of which a pass needs few rows.
    """

    def __init__(self, embedding: nn.Embedding, team: Team) -> None:
        """Wraps an embedding whose weights are this rank's rows, or all rows while it is gathered for sampling."""
        self._embedding, self._team = embedding, team
        self._num_rows = len(embedding.weight)
        if embedding.padding_idx is not None:
            # The row of the padding token is never trained; only the rank that has it must know.
            rank, row = divmod(embedding.padding_idx, self._num_rows)
            embedding.padding_idx = row if rank == team.index else None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Looks up int64 [n] -> [n, hidden]; n may differ between ranks. All ranks of the team call this together,
        unless the embedding is gathered."""
        if len(self._embedding.weight) > self._num_rows:
            return self._embedding(tokens)
        by_rank, order = tokens.sort(stable=True)
        num_wanted = (by_rank // self._num_rows).bincount(minlength=self._team.size)
        sent, received = num_wanted.tolist(), self._team.all_to_all(num_wanted).tolist()
        wanted = self._team.all_to_all(by_rank % self._num_rows, sent, received)
        rows = all_to_all_rows(self._embedding(wanted), self._team, received, sent)
        return rows.index_select(0, order.argsort())
