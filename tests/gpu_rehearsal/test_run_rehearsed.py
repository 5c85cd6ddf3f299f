"""What ``ddp-equivalence run`` says before and after its tests on a machine with GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu_rehearsal.rehearsal import rehearse

FEW = "tests/equivalence/test_ddp_gathered.py"


def test_the_plan_of_eight_gpus_needs_no_context_and_falls_back_nowhere() -> None:
    planned = rehearse("ddp_equivalence", "run", "--plan", gpus=8)
    assert planned.returncode == 0, planned.output
    assert not planned.contexts
    assert not planned.log
    assert planned.output.count("Pretended GPU (rehearsed), compute capability") == 8
    assert re.search(r"^  nccl +\d+ cases on 1 to 8 ranks$", planned.output, re.MULTILINE)
    assert re.search(r"^  data_parallel +\d+ cases on 2 to 4 ranks$", planned.output, re.MULTILINE)
    assert "gloo_fallback" not in planned.output
    assert "Processes: at most " in planned.output
    assert "nothing was timed on data_parallel, gloo_cuda, nccl, which may take" in planned.output


def test_a_run_says_which_gpus_were_used_and_that_the_transport_is_not_known(
    tmp_path: Path,
) -> None:
    ran = rehearse(
        *("ddp_equivalence", "run", "-p", "no:randomly", "-p", "no:cacheprovider"),
        *("--record", str(tmp_path), FEW, "-k", "mlp-contrastive-1x2-equal-float64 and not steps"),
        gpus=4,
        environment={"NCCL_DEBUG": "WARN", "NCCL_TOPO_FILE": "/home/somebody/topology"},
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
