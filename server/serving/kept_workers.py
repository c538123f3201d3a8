"""Names the workers on Ray that outlive the servers of a state directory."""

import secrets
from pathlib import Path

from ...workers.protocol.worker_config import KeptWorkers
from ..config.server_config import ServerConfig
from ..files.directories import read_regular
from ..files.state_lock import KEPT_WORKERS_NAME, StartError


def kept_workers(config: ServerConfig, epoch: int | None) -> KeptWorkers | None:
    """Returns the kept workers of the state directory; None if workers end with their server, which ends kept ones.

    Args:
        epoch: of the server's lease, if it has one.
    Raises:
        StartError: the state directory cannot be used.
    """
    file = config.store.state_dir.absolute() / KEPT_WORKERS_NAME
    try:
        if not config.ranks.keep_workers_seconds:
            file.unlink(missing_ok=True)
            return None
        state_id = _read_or_create(file)
    except OSError as error:
        raise StartError(f"{file} cannot be used: {error.strerror}") from None
    return KeptWorkers(str(file), state_id, config.ranks.keep_workers_seconds, secrets.token_hex(8), epoch)


def _read_or_create(file: Path) -> str:
    if not file.exists():
        aside = file.with_name(f"{file.name}.new")
        aside.write_text(secrets.token_hex(16))
        aside.replace(file)
    return read_regular(file).decode()
