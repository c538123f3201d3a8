"""docs/troubleshooting.md quotes messages that the code has."""

import re

import pytest

from .blocks import ROOT
from .messages import is_message

PAGE = ROOT / "docs" / "troubleshooting.md"


@pytest.mark.slow
def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)
    assert len(quoted) > 25
    assert not [message for message in quoted if not is_message(message)]


@pytest.mark.slow
def test_a_message_that_the_code_does_not_have_is_found() -> None:
    assert is_message("rank ... exceeds max_lora_rank") and not is_message("rank ... is above max_lora_rank")
