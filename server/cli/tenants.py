"""`trainhouse tenants`: lists the tenants of a server, from its state."""

from collections.abc import Mapping

from sqlalchemy import ColumnElement, Connection, Table, func, select

from ..store.database.schema import api_keys, checkpoints, runs, sessions, tenants
from .keys import with_store
from .options import AsJson, new_app
from .output import print_json, print_table
from .server_flags import Sources, reads_state

app = new_app("List tenants with their keys, runs and checkpoints, without a server.")


@app.callback()
def _() -> None:
    """Makes `list` a verb, to which others can be added."""


@app.command("list")
@reads_state()
def list_all(sources: Sources, as_json: AsJson = False) -> None:
    """List all tenants: their keys, what they have stored, and when they last opened a session."""
    found = with_store(sources, lambda store: store.read(_tenants))
    if as_json:
        print_json({"tenants": found})
        return
    head = ("TENANT", "KEYS", "SESSIONS", "RUNS", "CHECKPOINTS", "BYTES")
    print_table(head, [tuple(tenant.values())[1:] for tenant in found])


def _tenants(connection: Connection) -> list[dict[str, object]]:
    valid = _counts(connection, api_keys, api_keys.c.revoked_at.is_(None))
    counts = [_counts(connection, table) for table in (sessions, runs, checkpoints)]
    stored = select(checkpoints.c.tenant_id, func.sum(checkpoints.c.size_bytes)).group_by(checkpoints.c.tenant_id)
    num_bytes = {row[0]: row[1] for row in connection.execute(stored)}
    names = ("sessions", "runs", "checkpoints")
    return [
        {
            "tenant_id": row.tenant_id,
            "name": row.name,
            "keys": valid.get(row.tenant_id, 0),
            **{name: of_name.get(row.tenant_id, 0) for name, of_name in zip(names, counts, strict=True)},
            "checkpoint_bytes": int(num_bytes.get(row.tenant_id, 0)),
        }
        for row in connection.execute(select(tenants).order_by(tenants.c.name))
    ]


def _counts(connection: Connection, table: Table, condition: ColumnElement[bool] | None = None) -> Mapping[str, int]:
    """Returns the number of rows by tenant."""
    query = select(table.c.tenant_id, func.count()).group_by(table.c.tenant_id)
    query = query if condition is None else query.where(condition)
    return {row[0]: row[1] for row in connection.execute(query)}
