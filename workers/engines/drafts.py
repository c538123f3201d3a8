"""Loads and drops draft models in the workers of a group. A crash of a worker loses them."""

from pathlib import Path

from ..scheduler.rank_group import RankGroup
from ..scheduler.work import WorkerCall


async def load_draft(group: RankGroup, draft_id: str, directory: Path) -> None:
    """Raises OperationError."""
    verb = WorkerCall("load_draft", (draft_id, str(directory)), creates=draft_id)
    await group.submit(draft_id, "", verb)


async def drop_draft(group: RankGroup, draft_id: str) -> None:
    """Drops the draft. Unknown and lost drafts are ignored. Raises OperationError."""
    if not group.forget_lost(draft_id):
        await group.submit(draft_id, "", WorkerCall("drop_adapter", (draft_id,), drops=draft_id))
