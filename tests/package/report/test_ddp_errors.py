"""Errors of DistributedDataParallel: the report names the parameter, the module, the line and what
mends it, on one screen without torch's internals, and what it says does mend it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddp_equivalence import Case, check
from ddp_equivalence.report.blocks import MOST_ROWS_OF_SCREEN, WIDEST_SCREEN
from tests.package.own_cases import build_model, make_batch, right_step
from tests.package.own_cases import loss as plain_loss
from tests.package.report import ddp_errors as steps
from tests.package.report.ddp_errors import in_two_parts, wrapped

FIND: dict[str, Any] = {"find_unused_parameters": True}
STATIC: dict[str, Any] = {"static_graph": True}


def checkpointed(reentrant: bool = True, times: int = 1) -> Callable[[], nn.Module]:
    return lambda: steps.Checkpointed(reentrant, times)


def row(
    name: str,
    step: Any,
    words: tuple[str, ...],
    *mended: tuple[Any, Any],
    model: Any = steps.Heads,
    loss: Any = plain_loss,
    layout: str = "1x2",
    after: str = "same",
) -> Any:
    """``words``: of the report. ``mended``: the models and steps that the report advises.
    ``after``: the outcome of these.
    """
    return pytest.param(step, words, mended, model, loss, layout, after, id=name)


FILE = Path(steps.__file__)


def at(source: str) -> str:
    """The line of ``ddp_errors.py`` with this text, as a report shows it."""
    (number,) = (
        number
        for number, line in enumerate(FILE.read_text().splitlines(), start=1)
        if line.strip() == source
    )
    return f"{FILE.name}:{number} {source}"


CHECKPOINT = at("rows = checkpoint(self.block, rows, use_reentrant=self.reentrant)")
TWICE = "RuntimeError: Expected to mark a variable ready only once."
UNFINISHED = "RuntimeError: Expected to have finished reduction in the prior iteration before"

ROWS = [
    row(
        "a checkpoint with find_unused_parameters",
        wrapped(**FIND),
        (
            TWICE,
            "DDP saw the gradient of block.down.bias twice: the checkpoint of block runs",
            CHECKPOINT,
            f"Fix: checkpoint(..., use_reentrant=False) in {CHECKPOINT.split()[0]}.",
            "> " + at("of(ddp, shard).backward()"),
            "Rank 1 raised the same.",
        ),
        (checkpointed(reentrant=False), wrapped(**FIND)),
        (checkpointed(), wrapped(**STATIC)),
        model=checkpointed(),
    ),
    row(
        "a block that is checkpointed twice",
        wrapped(),
        (
            TWICE,
            "gradient of block.down.bias twice: the checkpoint of block",
            "use_reentrant=False",
        ),
        (checkpointed(reentrant=False, times=2), wrapped()),
        (checkpointed(times=2), wrapped(**STATIC)),
        model=checkpointed(times=2),
    ),
    row(
        "a checkpoint of a function",
        wrapped(),
        (
            TWICE,
            "of block.down.bias twice: the checkpoint of block",
            "use_reentrant=False) in ddp_",
        ),
        (lambda: steps.CheckpointedFunction(reentrant=False), wrapped()),
        (steps.CheckpointedFunction, wrapped(**STATIC)),
        model=steps.CheckpointedFunction,
    ),
    row(
        "a backward method that runs a backward pass",
        wrapped(),
        (
            TWICE,
            "of block.down.bias twice: a backward method runs a backward pass",
            "torch.autograd.backward(out, gradients[0])",
            "Fix: DistributedDataParallel(..., static_graph=True)",
        ),
        (steps.Reversible, wrapped(**STATIC)),
        model=steps.Reversible,
    ),
    row(
        "two backward passes through one forward",
        steps.backward_twice,
        (
            TWICE,
            "body.bias got a gradient from a second backward pass, before every parameter",
            "body is behind both losses",
            'F.mse_loss(first, shard["targets"]).backward(retain_graph=True)',
            "> " + at('F.mse_loss(second, shard["targets"]).backward()'),
            "Fix: add the losses, and call backward() once.",
        ),
        (steps.BothHeads, wrapped(steps.loss_of_both)),
        model=steps.BothHeads,
        loss=steps.loss_of_both,
    ),
    row(
        "a backward pass for each of two forwards",
        steps.backward_of_each_call,
        (
            TWICE,
            "body.bias got a gradient from a second backward pass",
            "> " + at("second.backward()"),
        ),
        (steps.Heads, wrapped(steps.loss_of_two_calls)),
        loss=steps.loss_of_two_calls,
    ),
    row(
        "a penalty outside forward",
        wrapped(steps.penalised, **FIND),
        (
            TWICE,
            "Its last call did not use aux.",
            "counts it as unused (find_unused_parameters=True). But the loss uses it:",
            "Fix: leave find_unused_parameters=True out, if every step uses all parameters",
        ),
        (steps.Heads, wrapped(steps.penalised)),
        (steps.Heads, wrapped(steps.penalised, **STATIC)),
        loss=steps.penalised,
    ),
    row(
        "two calls that use different parameters",
        wrapped(steps.loss_of_two_calls, **FIND),
        (TWICE, "Its last call did not use aux.", "from an earlier call"),
        (steps.Heads, wrapped(steps.loss_of_two_calls)),
        loss=steps.loss_of_two_calls,
    ),
    row(
        "an output in which DDP finds no tensor",
        wrapped(steps.loss_of_opaque, **FIND),
        (TWICE, "through an output in which DDP finds no tensor"),
        (steps.Opaque, wrapped(steps.loss_of_opaque)),
        model=steps.Opaque,
        loss=steps.loss_of_opaque,
    ),
    row(
        "parameters that no step uses",
        in_two_parts(),
        (
            UNFINISHED,
            "No gradient in the backward pass before: aux.weight, aux.bias (ranks 0, 1).",
            "out = ddp(rows, aux=uses_aux(part, rank.rank))",
            "Fix: DistributedDataParallel(..., find_unused_parameters=True).",
            "requires_grad_(False) for what no step uses",
        ),
        (steps.Heads, in_two_parts(**FIND)),
        (steps.Heads, in_two_parts(freezes=True)),
    ),
    row(
        "parameters that ranks use in turn",
        in_two_parts(lambda part, rank: part != rank % 2),
        (
            UNFINISHED,
            "aux.weight, aux.bias (ranks 0, 2); head.weight, head.bias (ranks 1, 3).",
        ),
        (steps.Heads, in_two_parts(lambda part, rank: part != rank % 2, **FIND)),
        layout="2x2",
        after="different",  # the loss of the case uses one head
    ),
    row(
        "an optimizer that steps before backward",
        steps.steps_between(in_time=False),
        (
            "has been modified by an inplace operation.",
            "2.weight was changed between the forward pass that used it and the backward pass.",
            "optimizer.step() an optimizer steps",
            "> ddp_errors.py",
            "Fix: call backward() before the weights change in ddp_errors.py",
        ),
        (build_model, steps.steps_between(in_time=True)),
        model=build_model,
    ),
    row(
        "a parameter that is frozen on one rank",
        steps.freezes(lambda rank: rank == 1),
        (
            "DDP expects same model across all ranks, but Rank",
            "Rank 0 trains 2.bias, which rank 1 lacks or has frozen.",
            "Fix: build the same model on all ranks, and freeze the same parameters.",
        ),
        (build_model, steps.freezes(lambda rank: False)),
        model=build_model,
        layout="1x3",
    ),
    row(
        "a layer that is wider on one rank",
        steps.widens((1,)),
        ("0.weight has the shape 8x5 on rank 1, and another on rank 0.", "build the same model"),
        (build_model, steps.widens(())),
        model=build_model,
        layout="1x3",
    ),
    row(
        "a part without anything to train",
        steps.frozen_part(wraps=True),
        (
            "DistributedDataParallel is not needed when a module doesn't have any parameter",
            "first = DistributedDataParallel(first)",
            "Hint: call this module without DistributedDataParallel",
        ),
        (steps.frozen_model, steps.frozen_part(wraps=False)),
        model=steps.frozen_model,
    ),
    row(
        "a graph that changes though it is called static",
        in_two_parts(lambda part, rank: part == 1, **STATIC),
        ("Your training graph has changed", "Hint: leave static_graph=True out"),
        (steps.Heads, in_two_parts(lambda part, rank: part == 1, **FIND)),
        after="different",  # as above
    ),
    row(
        "a static graph whose first pass does not synchronise",
        in_two_parts(syncs_first=False, **STATIC),
        ("INTERNAL ASSERT FAILED", "Leave it out, or make the first pass without no_sync()"),
        (steps.Heads, in_two_parts(syncs_first=False, **FIND)),
        (steps.Heads, in_two_parts(**STATIC)),
    ),
    row(
        "a weight that is changed in place",
        steps.changes_weight("weight"),
        ("RuntimeError: a leaf Variable that requires grad", "inside `with torch.no_grad():`"),
        (build_model, steps.changes_weight("under no_grad")),
        model=build_model,
    ),
    row(
        "a row of a weight that is changed in place",
        steps.changes_weight("row"),
        ("a view of a leaf Variable that requires grad", "inside `with torch.no_grad():`"),
        (build_model, steps.changes_weight("under no_grad")),
        model=build_model,
    ),
    row(
        "gradients that are views of buckets",
        steps.clears("detach_", gradient_as_bucket_view=True),
        ("Can't detach views in-place", "Hint: set gradients to None, as optimizer.zero_grad()"),
        (build_model, steps.clears("None", gradient_as_bucket_view=True)),
        (build_model, steps.clears("detach_")),
        model=build_model,
    ),
    row(
        "devices of a model on the CPU",
        steps.on_device(device_ids=True),
        ("only work with", "device_ids=[rank.device] if rank.device.type == 'cuda' else None"),
        (build_model, steps.on_device(device_ids=False)),
        model=build_model,
    ),
    row(
        "an attribute of the model",
        steps.attribute_of(of_module=False),
        ("has no attribute 'body'", "are those of ddp.module. But call ddp itself"),
        (steps.Heads, steps.attribute_of(of_module=True)),
        after="different",
    ),
]

INTERNALS = re.compile(r"/__w/|\.cpp|Traceback|site-packages|_engine_run_backward")


@pytest.mark.parametrize(("step", "words", "mended", "model", "loss", "layout", "after"), ROWS)
def test_the_report_names_what_mends_the_step(
    step: Any,
    words: tuple[str, ...],
    mended: tuple[tuple[Any, Any], ...],
    model: Any,
    loss: Any,
    layout: str,
    after: str,
) -> None:
    def case_of(model: Any) -> Case:
        return Case(model=model, batch=make_batch, loss=loss, layout=layout)

    verdict = check(case_of(model), step)
    assert verdict.outcome == "unknown"
    text = str(verdict)
    joined = " ".join(text.split())
    assert [one for one in words if one not in joined] == [], text
    assert_short(text)
    whole = " ".join(verdict.full_report().split())
    assert "Traceback" in whole
    advice = [one for one in words if one.startswith(("Fix: ", "Hint: "))]
    assert [one for one in advice if one not in whole] == [], whole
    outcomes = [check(case_of(better), right).outcome for better, right in mended]
    assert outcomes == [after] * len(mended)


def assert_short(text: str) -> None:
    lines = text.rstrip().splitlines()
    assert len(lines) <= MOST_ROWS_OF_SCREEN, text
    commands = ("  Again:", "  More:")
    assert all(len(line) <= WIDEST_SCREEN or line.startswith(commands) for line in lines), text
    assert INTERNALS.search(text) is None, text


def test_an_error_of_earlier_work_is_not_taken_for_this_one() -> None:
    """A wrapper that earlier work has left on the ranks has parameters of the same names."""

    def case_of(loss: Any) -> Case:
        return Case(model=steps.Heads, batch=make_batch, loss=loss, layout="1x2")

    assert check(case_of(plain_loss), steps.keeps_its_wrapper).outcome == "same"
    text = str(check(case_of(steps.loss_of_two_calls), steps.backward_of_each_call))
    assert "body.bias got a gradient from a second backward pass" in " ".join(text.split())


def test_a_right_step_with_ddp_has_no_error() -> None:
    case = Case(model=build_model, batch=make_batch, loss=plain_loss, layout="1x2")
    assert check(case, right_step).failure is None
