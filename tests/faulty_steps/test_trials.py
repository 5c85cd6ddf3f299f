"""Where a report shows other lines than the faulty one, trials of edits find it in most steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faulty_steps.keys import KEYS, STEPS, lines_near, verdict_of

FOUND = ("s149", "s180", "s184", "s196", "s220", "s234", "s236")
"""Steps whose reports show other lines if no edits are tried. More of them are found; these are
found in a few seconds.
"""


@pytest.mark.self_check
@pytest.mark.ddp(trial_seconds=60, deadline=240)
@pytest.mark.parametrize("key", [one for one in KEYS if one["file"].partition("_")[0] in FOUND])
def test_an_edit_of_the_faulty_line_is_found(
    key: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(STEPS / key["file"], monkeypatch)
    assert verdict.outcome == "different"
    assert verdict.repairs.shows_the_fault, str(verdict)
    first = verdict.repairs.found[0]
    assert first.line.number in lines_near(key), str(verdict)
    text = str(verdict)
    assert len(text.splitlines()) <= 16
    assert f":{first.line.number}  " in text
    assert "tried: all gradients right" in text
