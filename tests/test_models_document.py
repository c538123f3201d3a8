"""docs/models.md says what the code does."""

import pytest

from .models_document import DOCUMENT, document


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_document_of_models_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `make models`"
