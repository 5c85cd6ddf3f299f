"""What the full report says beside the short one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import case
from tests.package.own_cases import build_model
from tests.package.own_cases import loss as squares

LONG = "blocks_of_the_encoder_that_has_a_name_of_more_than_45_characters"


def clips_and_steps(model: nn.Module, shard: Any, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    (3 * squares(ddp, shard)).backward()
    clip_grad_norm_(list(model.parameters())[:2], 1e9)
    clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()


def named_at_length() -> nn.Module:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, LONG, build_model())

        def forward(self, rows: Tensor) -> Any:
            return getattr(self, LONG)(rows)

    return Long()


def test_it_says_what_was_clipped_and_which_optimizer_stepped() -> None:
    text = " ".join(check(case(), clips_and_steps).full_report().split())
    here = os.path.basename(__file__)
    assert f"gradients were clipped: clip_grad_norm_ to 1e+09 at {here}:25, " in text
    assert f"optimizer steps: SGD at {here}:27" in text


def test_the_numbers_of_a_parameter_with_a_long_name_stand_in_their_columns() -> None:
    lines = check(case(model=named_at_length), clips_and_steps).full_report().splitlines()
    header = next(line for line in lines if "ratio of norms" in line)
    name = next(n for n, line in enumerate(lines) if line.startswith(f"    {LONG}.2.bias  (3,)"))
    assert lines[name].endswith("(3,)")
    assert len(lines[name + 1]) == len(header)
    assert lines[name + 1].split()[-1] == "3.000"
