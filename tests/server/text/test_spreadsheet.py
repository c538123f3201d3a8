"""No cell of a CSV file is run as a formula."""

import unicodedata

import pytest
from trainhouse.server.text.spreadsheet import cell_text

SIGNS = "=+-@"
SKIPPED = (
    "",
    " ",
    "  ",
    "\t",
    "\r",
    "\n",
    "\r\n",
    "\x00",
    "\x0b",
    "\xa0",
    "\u3000",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\x1c",
)


@pytest.mark.parametrize("skipped", SKIPPED)
@pytest.mark.parametrize("sign", SIGNS)
def test_formulas_of_all_forms_are_quoted(sign: str, skipped: str) -> None:
    forms = [one for one in map(chr, range(0x20, 0x30000)) if unicodedata.normalize("NFKC", one)[:1] == sign]
    assert len(forms) > 1 and sign in forms
    for form in forms:
        assert cell_text(f"{skipped}{form}1+1").startswith("'"), ascii(form)
    assert cell_text(f"{skipped}{sign}\u0338").startswith("'"), "a mark that changes the sign's looks"


@pytest.mark.parametrize("text", ["\ta", "\rb", "\nc", " d", "\u3000e", "\u2212f"])
def test_blanks_first_are_quoted(text: str) -> None:
    assert cell_text(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "loss:mean", "a=1", "\u00e9", "<b>", "'=1", "1-2", "\u540d\u524d"])
def test_other_names_stay_as_they_are(text: str) -> None:
    assert cell_text(text) == text
