"""The format version of the tables, and the migrations from older versions."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, inspect, select, text, update

from .database.schema import format_table, metadata

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
    # New databases have no samplers.directory, which was never used. Existing ones keep it, always NULL: SQLite can
    # drop columns only since 3.35, and Python may be linked with an older one.
    3: (),
    4: (
        "ALTER TABLE runs ADD COLUMN role VARCHAR_C NOT NULL DEFAULT 'policy'",
        "ALTER TABLE checkpoints ADD COLUMN role VARCHAR_C NOT NULL DEFAULT 'policy'",
    ),
    # SQLite can rename columns since 3.25. An older trainhouse would misread a full fine-tuning configuration as LoRA.
    5: (
        "ALTER TABLE runs RENAME COLUMN lora TO training",
        "ALTER TABLE checkpoints RENAME COLUMN lora TO training",
    ),
    # An older trainhouse would misread a draft's configuration as LoRA, too.
    6: (
        "ALTER TABLE runs ADD COLUMN target_path VARCHAR_C",
        "ALTER TABLE checkpoints ADD COLUMN target_path VARCHAR_C",
    ),
    7: ("ALTER TABLE samplers ADD COLUMN draft_path VARCHAR_C",),
    8: ("ALTER TABLE runs ADD COLUMN asked VARCHAR_C",),
    9: ("ALTER TABLE runs ADD COLUMN schedules JSON",),
    10: (
        """CREATE TABLE operations (
            run_id VARCHAR_C NOT NULL,
            seq_id BIGINT NOT NULL,
            kind VARCHAR_C NOT NULL,
            ended_at FLOAT NOT NULL,
            queued_seconds FLOAT NOT NULL,
            busy_seconds FLOAT NOT NULL,
            num_tokens BIGINT NOT NULL,
            step BIGINT,
            error VARCHAR_C,
            metrics JSON NOT NULL,
            PRIMARY KEY (run_id, seq_id)
        )""",
        "CREATE INDEX ix_operations_ended_at ON operations (ended_at)",
        """CREATE TABLE logged_metrics (
            run_id VARCHAR_C NOT NULL,
            step BIGINT NOT NULL,
            logged_at FLOAT NOT NULL,
            num_bytes BIGINT NOT NULL,
            metrics JSON NOT NULL,
            PRIMARY KEY (run_id, step)
        )""",
        "CREATE INDEX ix_logged_metrics_logged_at ON logged_metrics (logged_at)",
    ),
}
"""Version -> statements that migrate from the version before. They use SQL that both databases accept, and must never
be changed after a release.

PostgreSQL databases have at least format 2. VARCHAR_C becomes text with the collation of schema.PortableText on
PostgreSQL, and plain text on SQLite.
"""

FORMAT_VERSION = max(MIGRATIONS)


def create_or_migrate(connection: Connection, place: str, flag: str) -> None:
    """Creates the tables in an empty database or migrates older ones, in the caller's transaction, while no other
    process does so. Messages name the database by `place`, and by `flag` the option that selects another one. Raises
    ValueError if a newer trainhouse wrote the tables."""
    version = _version(connection)
    if version is None:
        metadata.create_all(connection)
        connection.execute(format_table.insert().values(version=FORMAT_VERSION))
        return
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{place} has format {version}, but this trainhouse supports formats up to {FORMAT_VERSION}: "
            f"upgrade trainhouse or choose another {flag}"
        )
    for newer in range(version + 1, FORMAT_VERSION + 1):
        for statement in MIGRATIONS[newer]:
            connection.execute(text(for_dialect(statement, connection.dialect.name)))
    connection.execute(update(format_table).values(version=FORMAT_VERSION))


def for_dialect(statement: str, name: str) -> str:
    return statement.replace("VARCHAR_C", 'VARCHAR COLLATE "C"' if name == "postgresql" else "VARCHAR")


def _version(connection: Connection) -> int | None:
    """Returns the format version, or None if there are no tables yet."""
    if not inspect(connection).has_table(format_table.name):
        return None
    return connection.execute(select(format_table.c.version)).scalar_one_or_none()
