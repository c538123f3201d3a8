"""docs/models.md says what the code does."""

import pytest
from trainhouse.workers.shapes.model_shape import refusal_of

from .models_document import DOCUMENT, by_decision, document


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_document_of_models_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `make models`"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_refusals_in_the_document_do_not_depend_on_further_fields() -> None:
    """A config.json may name the type alone."""
    *_, refused = by_decision()
    assert {each: refusal_of({"model_type": each}) for each in refused} == refused
