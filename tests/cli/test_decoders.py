"""Models that do not continue texts are refused."""

from __future__ import annotations

import pytest

from symbiosis.cli.decoders import check_decoder
from symbiosis.errors import UsageError
from symbiosis.testing import tiny_model
from symbiosis.testing.zoo import zoo_model


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BertForSequenceClassification"])
def test_models_that_do_not_continue_texts(name: str) -> None:
    check_decoder(tiny_model("gpt2"))
    with pytest.raises(UsageError, match=f"the model is a {name}, which does not continue texts"):
        check_decoder(zoo_model(name))
