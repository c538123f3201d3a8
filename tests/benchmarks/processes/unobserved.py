"""`unobserved.py serve ...`: our server without metrics, log lines of what it does, traces and history."""

from trainhouse.server.__main__ import main
from trainhouse.server.journal.futures import Future, Futures, Result
from trainhouse.server.store import OperationRecord
from trainhouse.server.telemetry.telemetry import Telemetry
from trainhouse.workers.protocol.work_context import WorkContext

_resolve = Futures.resolve


def _resolve_alone(self: Futures, future: Future, result: Result, ended: OperationRecord | None = None) -> None:
    _resolve(self, future, result)


def _nothing(*_: object) -> None:
    pass


def serve() -> None:
    nowhere = WorkContext()
    Telemetry.request_began = Telemetry.work_began = lambda *_: nowhere
    Telemetry.request_ended = Telemetry.operation_ended = _nothing
    Telemetry.sample_ended = Telemetry.call_ended = Telemetry.journal_written = _nothing
    Futures.resolve = _resolve_alone
    main()


if __name__ == "__main__":
    serve()
