"""Training scripts of about a hundred lines, each of them with one mistake.

Their authors knew neither this package nor its rules, and chose the mistakes. A mistake is none on
one device: it makes what several ranks compute differ from one device with one big batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from ddp_equivalence import observe
from ddp_equivalence.observed_scripts import launch
from tests.combinations import one_of_each
from tests.package.forks import started

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Mistake:
    """``right`` becomes ``wrong`` in a script. ``first``: the first step that is then different, of
    all that are recorded. ``cause``: the name that the report gives, if any.
    """

    right: str
    wrong: str
    first: int = 1
    cause: str | None = None


MISTAKES = {
    "clips": Mistake(
        "    return sum_over_ranks(n) / dist.get_world_size()\n",
        "    return n\n",
        cause="token_counts_weighted_equally",
    ),
    "draws": Mistake(
        "    loss = (loss * mask).sum(1) / mask.sum(1)          "
        "# [N], mean over the hidden patches of each image\n    return loss.mean()\n",
        "    return (loss * mask).sum() / mask.sum()\n",
    ),
    "moving_state": Mistake("reduce_mean(lengths.mean())", "lengths.detach().mean()", first=4),
}


@pytest.mark.parametrize("name", one_of_each(lambda name: True, MISTAKES))
def test_a_trainer_with_one_mistake_is_different_from_its_first_wrong_step_on(
    name: str, tmp_path: Path
) -> None:
    mistake, script = MISTAKES[name], (SCRIPTS / f"{name}.py").read_text("utf-8")
    assert script.count(mistake.right) == 1
    (tmp_path / f"{name}.py").write_text(script.replace(mistake.right, mistake.wrong), "utf-8")
    command = f"torchrun --standalone --nproc-per-node 2 {name}.py"
    with patch.object(launch, "start", started):
        found = observe(command, folder=tmp_path, deadline=300.0, steps=mistake.first)
    before = mistake.first - 1
    outcomes = [one.outcome for one in found.verdicts][: mistake.first]
    assert outcomes == ["same"] * before + ["different"], str(found)
    assert found.cause == mistake.cause, str(found)
