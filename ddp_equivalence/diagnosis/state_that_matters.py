"""Asks whether the state that a right step leaves gives the next step another gradient.

Codebooks, centres and moving averages are no parameters: no gradient reaches them, and each rank
moves them by its own rows, unless the step reduces them. The gradients of the step itself are then
right, and those of the next one are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.model_state import put_state
from ddp_equivalence.case.no_loss import no_loss
from ddp_equivalence.case.precision import cast_model
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.diagnosis.buffers_beside import BufferBeside, buffers_beside, text_of_buffers
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.lines.words_of_lines import names_text
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.reference import in_dtype, train

NAME = "buffers_differ_from_big_batch"

REDUCE = "reduce what changes {} over all ranks, so that each rank keeps what the big batch would."
AS_OFTEN = (
    "change {} as often as the big batch does, which is once for a step, and by all its rows."
)

MATTERS = 1e-9
"""Gradients are others if they differ by more than this, relative to their norm."""


def state_that_matters(expected: Expected, measured: Measurement) -> tuple[BufferBeside, ...]:
    """The state that is not that of the big batch on some rank, if the big batch has another
    gradient with it than with its own; () otherwise, where the gradients of this step differ, or
    where that cannot be computed.
    """
    reference, evidence = expected.reference, measured.evidence
    if not measured.comparison.same or reference.at_each_step:
        return ()
    beside = buffers_beside(reference.buffers, evidence)
    if not beside or reference.case.loss is no_loss:
        return ()
    try:
        right = _gradients(expected, reference.buffers)
        for rank in dict.fromkeys(one.ranks[0] for one in beside):
            held = {one.name: evidence[rank].buffers_left[one.name] for one in beside}
            if _differ(_gradients(expected, {**reference.buffers, **held}), right):
                return beside
    except (BadCase, RuntimeError):  # the state of a rank does not fit, such as rows that it keeps
        return ()
    return ()


def _gradients(expected: Expected, state: Mapping[str, Tensor]) -> dict[GradientKey, Tensor | None]:
    """Those of the first big batch, for a model with this state."""
    reference, dtype = expected.reference, expected.reference.computed_in
    model = build_model(reference.case)
    model = model if dtype is None else cast_model(model, dtype)
    put_state(model, state)
    batch = in_dtype(expected.batches()[0], dtype)
    return train(reference.case, model, [batch], "gradients", Training())[0]


def _differ(
    some: Mapping[GradientKey, Tensor | None], others: Mapping[GradientKey, Tensor | None]
) -> bool:
    for key, one in some.items():
        other = others[key]
        if one is None or other is None:
            if one is not other:
                return True
        elif float((one - other).norm()) > MATTERS * float(other.norm()):
            return True
    return False


def finding_of_state(
    beside: Sequence[BufferBeside],
    evidence: Mapping[int, Evidence],
    seen: Mapping[int, Observation],
) -> Finding:
    """The finding that a step leaves this state, and has right gradients. ``evidence``: of the
    ranks; without any, each rank is taken to have changed the state by its own rows.
    """
    names = names_text([one.name for one in beside])
    held = [
        {name: one.buffers.get(name) for name in (b.name for b in beside)}
        for one in evidence.values()
    ]
    apart = not held or any(one != held[0] for one in held)
    by_whom = " by the rank's own rows" if apart else ""
    return Finding(
        cause=NAME,
        sentence="The gradients of the step are right, and the state that it leaves is not that of "
        "the big batch: buffers, or tensors that modules keep. The next gradient depends on them.",
        look_at="the lines that change this state: how often they run, and by which rows",
        accepted=True,
        fits=True,
        detail=f"these are off, relative to their norms: {text_of_buffers(beside)}",
        because="the ranks hold different values of it afterwards" if apart and held else "",
        headline=f"{names}, which the next step reads, {'is' if len(beside) == 1 else 'are'} not "
        "what the big batch leaves",
        fix=(REDUCE if apart else AS_OFTEN).format(names),
        lines=tuple(_lines([one.name for one in beside], by_whom, seen)),
    )


def _lines(
    names: Sequence[str], by_whom: str, seen: Mapping[int, Observation]
) -> list[PointedLine]:
    """The last line that changed this state on a rank."""
    for of_rank in seen.values():
        changes = [
            call
            for call in of_rank.calls
            if call.kind is Kind.BUFFERS and call.line and set(names) & set(call.names)
        ]
        if changes:
            line = changes[-1].line
            assert line is not None
            return [PointedLine(line, f"changes {names_text(names)}{by_whom}", True)]
    return []
