"""The lines of the log: one for each record, which no text of a user can forge or stretch."""

import json
import logging
import sys

import pytest
from trainhouse.workers.protocol.log_lines import LineFormatter, LogForm, log_event, log_remote_failure
from trainhouse.workers.protocol.work_context import CURRENT_WORK, WorkContext

FORGED = "m\r\n2026-01-01 00:00:00 ERROR   trainhouse: forged\x1b[2J\u2028\u202e\ud800"


class Lines(logging.Handler):
    """Keeps formatted records."""

    def __init__(self, form: LogForm, rank: int | None = None) -> None:
        super().__init__()
        self.setFormatter(LineFormatter(form, rank))
        self.texts: list[str] = []
        self.logger = logging.Logger("trainhouse.of.test", logging.DEBUG)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("place", ["message", "field", "id", "rank"])
def test_no_text_of_a_user_begins_a_line_or_controls_a_terminal(form: LogForm, place: str) -> None:
    lines = Lines(form, 3 if place == "rank" else None)
    CURRENT_WORK.set(WorkContext(run=FORGED if place == "id" else "r"))
    if place == "field":
        log_event(lines.logger, logging.INFO, "request", {"path": FORGED})
    else:
        lines.logger.info("no model %s", FORGED)
    [line] = lines.texts
    assert line.isprintable() and line.encode() and "forged" in line, "it must be there, and harmless"
    assert not FORGED.isprintable()


def test_a_line_of_text_has_its_fields_and_the_ids_of_the_work() -> None:
    lines = Lines("text")
    CURRENT_WORK.set(WorkContext(request="ab12", tenant="t-1", run="s:train:0"))
    log_event(lines.logger, logging.WARNING, "request", {"status": 401, "path": None, "reason": 'no "key"', "ms": 0.5})
    assert lines.texts[0].partition(" ")[2].partition(" ")[2] == (
        'WARNING trainhouse.of.test: request status=401 reason="no \\"key\\"" ms=0.5 request=ab12 tenant=t-1 '
        "run=s:train:0"
    )


def test_a_line_of_json_has_its_fields_the_ids_and_the_rank() -> None:
    lines = Lines("json", rank=2)
    CURRENT_WORK.set(WorkContext(tenant="t-1", trace="f" * 32))
    log_event(lines.logger, logging.INFO, "operation", {"verb": "forward", "tokens": 7, "reason": None})
    found = json.loads(lines.texts[0])
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "logger": "trainhouse.of.test",
        "message": "operation",
        "rank": 2,
        "verb": "forward",
        "tokens": 7,
        "tenant": "t-1",
        "trace": "f" * 32,
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_has_a_bounded_length(form: LogForm) -> None:
    lines = Lines(form)
    long = "x" * 10_000_000
    log_event(lines.logger, logging.INFO, long, {"path": long})
    log_remote_failure(lines.logger, long, long)
    assert all(100 < len(line) < 30_000 for line in lines.texts)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_traceback_is_in_the_line_or_indented_below_it(form: LogForm, is_remote: bool) -> None:
    lines = Lines(form)
    CURRENT_WORK.set(WorkContext(run="r"))
    try:
        raise RuntimeError(f"lost\n{FORGED}")
    except RuntimeError:
        if is_remote:
            log_remote_failure(lines.logger, "rank 0 failed", lines.formatter.formatException(sys.exc_info()))  # pyright: ignore
        else:
            lines.logger.exception("it failed")
    [text] = lines.texts
    first, *others = text.split("\n")
    assert "RuntimeError: lost" in text and "failed" in first
    assert all(line.startswith("  ") and line.isprintable() for line in others) and bool(others) == (form == "text")
