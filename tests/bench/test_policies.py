"""``symbiosis bench policies``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import command
from tests.simulation.made_up import trace_file

OPTIONS = "bench", "policies", "--preset", "tiny", "--rounds", "1", "--clients", "1", "--clients", "2", "--trace"


@pytest.mark.parametrize(("requests", "refused"), [(5, True), (6, False)])
def test_a_trace_has_texts_for_all_clients(tmp_path: Path, requests: int, refused: bool) -> None:
    trace = trace_file(tmp_path, *["0,100,20"] * requests)
    result = command(*OPTIONS, str(trace))
    assert result.exit_code == refused, result.output
    if refused:
        assert "the trace has 5 requests, and 2 clients need 6" in " ".join(result.stderr.split())


def test_a_trace_whose_answers_have_one_token_is_refused(tmp_path: Path) -> None:
    result = command(*OPTIONS, str(trace_file(tmp_path, *["0,100,5"] * 6)))
    assert result.exit_code == 1
    assert "have one token each" in " ".join(result.stderr.split())
