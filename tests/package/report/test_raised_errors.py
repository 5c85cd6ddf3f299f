"""Whatever a step raises, wherever: the report has the error's own text, the user's line and the
rank, on one screen without torch's internals.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddp_equivalence import check
from tests.package.own_cases import own_case
from tests.package.report import raised_errors as steps
from tests.package.report.test_ddp_errors import assert_short

ANYWHERE = {
    "a key on one rank": (steps.a_key_on_one_rank, "KeyError: 'mask'", 'shard["mask"]', 1),
    "many lines": (steps.many_lines, "ValueError: bad rows: row 0: no label", "raise ValueError"),
    "other weights": (
        steps.other_state,
        'Missing key(s) in state_dict: "0.weight"',
        "model.load_s",
    ),
    "from another": (steps.from_another, "RuntimeError: cannot read config.json", "raise Runtime"),
    "without a text": (steps.without_text, "AssertionError", 'assert len(shard["rows"]) == 99'),
    "in a library": (steps.in_numpy, "LinAlgError: Singular matrix", "np.linalg.inv(np.zeros"),
    "an exit": (steps.exits, "SystemExit: no checkpoint found", "raise SystemExit", 1),
}
IN_FORWARD = {
    "a shape": (steps.forward("shape"), "mat1 and mat2 shapes cannot be", "self.model(rows.T)"),
    "an index": (steps.forward("index"), "IndexError: index out of range", "self.words(torch."),
    "a name": (steps.forward("name"), "has no attribute 'scale'", "self.model(rows + self.scale)"),
    "a dtype": (steps.forward("dtype"), "must have the same dtype", "self.model(rows.float())"),
    "an argument": (steps.forward("mask"), "unexpected keyword argument 'mask'", "mask=None)"),
    "another model": (
        steps.forward("shape", only_on=1),
        "Rank 0 trains 0.weight, 0.bias, 2.weight, 2.bias, which rank 1 lacks or has frozen.",
        "ddp = DistributedDataParallel(Wrong(model, how) if wrong else model)",
    ),
}
IN_BACKWARD = {
    "an own method": (
        steps.own_backward(steps.Fails),
        "ArithmeticError: no gradient of a sort",
        'raise ArithmeticError("no gradient of a sort")',
    ),
    "a count": (steps.own_backward(steps.WrongCount), "(expected 1, got 2)", "F.mse_loss(out, sh"),
    "a shape": (steps.own_backward(steps.WrongShape), "returned an invalid gradient", "F.mse_loss"),
    "a hook": (steps.in_a_hook, "FloatingPointError: gradient is not", "raise FloatingPoint", 1),
    "a second one": (
        steps.backward_again,
        "backward through the graph a second",
        "of_shard.backwa",
    ),
    "of no number": (steps.backward_of_many, "only for scalar outputs", 'reduction="none").backwa'),
}
IN_THE_LOSS = {
    "a class": (steps.wrong_loss("class"), "Target 9 is out of bounds", "F.cross_entropy(out, to"),
    "a shape": (steps.wrong_loss("shape"), "The size of tensor a (3) must match", '(out - shard["'),
    "a dtype": (steps.wrong_loss("dtype"), "expected target dtype to be Long", "F.cross_entropy("),
    "no target": (steps.wrong_loss("none"), "'NoneType' object has no attribute", "F.mse_loss(out"),
    "on one rank": (steps.wrong_loss("one rank"), "Error: loss is 0.0", "raise FloatingPointEr", 1),
    "no gradient": (
        steps.wrong_loss("detached"),
        "does not require grad",
        "(value.detach() if how ==",
    ),
}
IN_A_WORKER = {
    "an item": (
        steps.loads("item"),
        "KeyError: 'no label of row 0' (in a worker process of a DataLoader)",
        'raise KeyError(f"no label of row {index}")',
    ),
    "sizes": (
        steps.loads("sizes"),
        "stack expects each tensor to be equal size",
        "for rows in Data",
    ),
    "a stream": (steps.loads("stream"), "OSError: the stream has ended early", "raise OSError("),
    "joining": (steps.loads("collate"), "TypeError: rows of different kinds", "raise TypeError("),
    "a late one": (
        steps.loads("late", timeout=1),
        "DataLoader timed out after 1",
        "for rows in Dat",
    ),
    "a killed one": (
        steps.loads("killed"),
        "exited unexpectedly",
        "for rows in DataLoader(data",
        None,
    ),
}
MOVE = "move the model and the data to rank.device"
ON_THE_CPU = {
    "a model": (steps.only_on_gpus("model"), MOVE, "model.cuda()"),
    "the device": (steps.only_on_gpus("device"), MOVE, "torch.cuda.set_device(rank.local_rank)"),
    "a tensor": (steps.only_on_gpus("tensor"), MOVE, 'torch.zeros(3, device="cuda")'),
    "a batch": (steps.only_on_gpus("to"), MOVE, 'shard["rows"].to(f"cuda:{rank.local_rank}")'),
    "waiting": (steps.only_on_gpus("synchronize"), MOVE, "torch.cuda.synchronize()"),
    "a group": (
        steps.only_on_gpus("group"),
        "leave the backend out, or choose gloo",
        "dist.all_red",
    ),
}

ROWS = [
    pytest.param(*row, id=f"{where}: {what}")
    for where, rows in (
        ("anywhere", ANYWHERE),
        ("in forward", IN_FORWARD),
        ("in backward", IN_BACKWARD),
        ("in the loss", IN_THE_LOSS),
        ("in a worker", IN_A_WORKER),
        ("on the CPU", ON_THE_CPU),
    )
    for what, row in (
        (what, row if len(row) == 4 else (*row, 0))  # type: ignore[misc, unused-ignore]
        for what, row in rows.items()
    )
]


@pytest.mark.parametrize(("step", "text", "source", "rank"), ROWS)
def test_the_report_has_the_error_the_line_and_the_rank(
    step: Any, text: str, source: str, rank: int | None
) -> None:
    """``rank``: the one that raises; 0 stands for all, None for any of them."""
    verdict = check(own_case(), step, deadline=30.0)
    report = str(verdict)
    assert verdict.outcome == "unknown"
    assert_short(report)
    assert text in " ".join(report.split()), report
    (line,) = (line for line in report.splitlines() if line.startswith("> "))
    assert re.match(r"> raised_errors\.py:\d+ ", line), report
    assert source in line, report
    assert f"Root cause: rank {rank or ''}" in report  # of all ranks any may be the first
    assert rank != 1 or "raised the same" not in report, report
