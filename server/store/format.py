"""The version of the tables in a database, and how those of an older trainhouse are brought to ours."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, inspect, select, text, update

from .tables import format_table, metadata

MIGRATIONS: Mapping[int, Sequence[str]] = {
    2: (
        "ALTER TABLE api_keys ADD COLUMN scopes JSON",
        "ALTER TABLE api_keys ADD COLUMN requests_per_minute INTEGER",
        """CREATE TABLE checkpoint_copies (
            directory VARCHAR NOT NULL,
            mirror VARCHAR NOT NULL,
            url VARCHAR NOT NULL,
            state VARCHAR NOT NULL,
            error VARCHAR,
            num_tries INTEGER NOT NULL,
            updated_at FLOAT NOT NULL,
            PRIMARY KEY (directory, mirror)
        )""",
        """CREATE TABLE leases (
            base_model VARCHAR NOT NULL,
            holder VARCHAR NOT NULL,
            url VARCHAR NOT NULL,
            epoch BIGINT NOT NULL,
            expires_at FLOAT NOT NULL,
            PRIMARY KEY (base_model)
        )""",
    ),
    # From here on nothing makes samplers.directory, which nothing ever used. Where it is it stays, always NULL: SQLite
    # drops columns only from 3.35 on, and Python may come with an older one.
    3: (),
    4: (
        "ALTER TABLE runs ADD COLUMN role VARCHAR_C NOT NULL DEFAULT 'policy'",
        "ALTER TABLE checkpoints ADD COLUMN role VARCHAR_C NOT NULL DEFAULT 'policy'",
    ),
    # SQLite renames columns from 3.25 on. What a full model has there, an older trainhouse would take for LoRA.
    5: (
        "ALTER TABLE runs RENAME COLUMN lora TO training",
        "ALTER TABLE checkpoints RENAME COLUMN lora TO training",
    ),
    # A draft's training an older trainhouse would take for LoRA, too.
    6: (
        "ALTER TABLE runs ADD COLUMN target_path VARCHAR_C",
        "ALTER TABLE checkpoints ADD COLUMN target_path VARCHAR_C",
    ),
    7: ("ALTER TABLE samplers ADD COLUMN draft_path VARCHAR_C",),
    8: ("ALTER TABLE runs ADD COLUMN asked VARCHAR_C",),
}
"""What leads from the version before to each. In the SQL that all our databases share; never changed afterwards.

No PostgreSQL is older than 2. VARCHAR_C is there text with the collation of tables.Text, and for SQLite any text.
"""

FORMAT_VERSION = max(MIGRATIONS)


def open_format(connection: Connection, place: str, flag: str) -> None:
    """Makes the tables in an empty database, migrates those of an older version; all in the caller's transaction.

    Nobody else may do so meanwhile. Raises ValueError when a newer trainhouse wrote them; `place` and `flag` tell the
    user which database it is and how another is chosen.
    """
    version = _version(connection)
    if version is None:
        metadata.create_all(connection)
        connection.execute(format_table.insert().values(version=FORMAT_VERSION))
        return
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{place} has format {version}, this trainhouse knows formats up to {FORMAT_VERSION}: "
            f"upgrade trainhouse or choose another {flag}"
        )
    for newer in range(version + 1, FORMAT_VERSION + 1):
        for statement in MIGRATIONS[newer]:
            connection.execute(text(for_dialect(statement, connection.dialect.name)))
    connection.execute(update(format_table).values(version=FORMAT_VERSION))


def for_dialect(statement: str, name: str) -> str:
    """A migration, in the SQL of the database of this name."""
    return statement.replace("VARCHAR_C", 'VARCHAR COLLATE "C"' if name == "postgresql" else "VARCHAR")


def _version(connection: Connection) -> int | None:
    """None: there are no tables yet."""
    if not inspect(connection).has_table(format_table.name):
        return None
    return connection.execute(select(format_table.c.version)).scalar_one_or_none()
