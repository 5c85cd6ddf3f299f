"""What ``ddp-equivalence run`` says before and after its tests on a machine with GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import ROOT, rehearse

DOCUMENT = ROOT / "docs" / "gpus.md"

FEW = "tests/equivalence/test_ddp_gathered.py"


def counted(lane: str, output: str) -> int:
    """The number of cases that the plan has on the lane."""
    row = re.search(rf"^  {lane} +(\d+) cases? on \d", output, re.MULTILINE)
    return int(row[1]) if row else 0


def documented(gpus: int) -> dict[str, int]:
    """Lane -> the number of cases in the table of docs/gpus.md."""
    rows = [line.split("|")[1:-1] for line in DOCUMENT.read_text().splitlines() if "|" in line]
    header = next(row for row in rows if row[0].strip() == "GPUs")
    row = next(row for row in rows if row[0].strip() == str(gpus))
    return {name.strip(" `"): int(cell) for name, cell in zip(header, row, strict=True)}


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_the_plan_needs_no_context_and_is_the_documented_one(gpus: int) -> None:
    planned = rehearse("ddp_equivalence", "run", "--all", "--plan", gpus=gpus)
    assert planned.returncode == 0, planned.output
    assert not planned.contexts
    assert not planned.log
    text, expected = planned.output, documented(gpus)
    assert text.count("Pretended GPU (rehearsed), compute capability") == gpus
    for lane, cases in expected.items():
        assert lane == "GPUs" or counted(lane, text) == cases, lane
    assert counted("gloo_fallback", text) == 0
    assert "NOT RUN" not in text
    assert "Processes: at most " in text


def test_a_run_says_which_gpus_were_used_and_that_the_transport_is_not_known(
    tmp_path: Path,
) -> None:
    ran = rehearse(
        *("ddp_equivalence", "run", "-p", "no:randomly", "-p", "no:cacheprovider"),
        *("--record", str(tmp_path), FEW, "-k", "mlp-contrastive-1x2-equal-float64 and not steps"),
        gpus=4,
        environment={"NCCL_DEBUG": "WARN", "NCCL_TOPO_FILE": "/srv/site/topology"},
    )
    assert ran.returncode == 0, ran.output
    assert not ran.initialised_by_no_rank()
    rows = re.findall(r"^GPU \d, Pretended GPU \(rehearsed\) .*$", ran.output, re.MULTILINE)
    assert len(rows) == 4
    used = [row for row in rows if not row.endswith("no case used it")]
    assert 2 <= len(used) < 4, "\n".join(rows)
    assert all(re.search(r" +\d+    [01](, 1)?$", row) for row in used)
    assert "NCCL's transport is not known: NCCL's log names no transport" in ran.output
    (page,) = tmp_path.iterdir()
    text = page.read_text()
    assert "NCCL_DEBUG=WARN, NCCL_TOPO_FILE=(set, not shown)" in text
    assert all(row in text for row in rows)
    assert "rehearsed" in text
    assert "GPU-0" not in text
