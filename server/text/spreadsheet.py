"""Text in cells of CSV files, which spreadsheets open."""

import unicodedata

_FORMULA_SIGNS = frozenset("=+-@\u2212")


def cell_text(text: str) -> str:
    """Returns the text, with a quote before it if a spreadsheet might run it as a formula.

    A formula begins with a sign, in any of its forms (full-width, superscript), after characters that are skipped.
    """
    seen = (unicodedata.normalize("NFKC", sign)[:1] for sign in text if sign.isprintable())
    first = next((sign for sign in seen if sign != " "), "")
    is_blank_first = text[:1].isspace() or not text[:1].isprintable()
    return f"'{text}" if first in _FORMULA_SIGNS or is_blank_first else text
