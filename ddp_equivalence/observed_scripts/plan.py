"""What a record shows of a script, before it is replayed: what one process will be given."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.report.line import Line, Style, labelled
from ddp_equivalence.report.wrapping import plural

MOST_LEAVES = 6


def plan_lines(
    record: Record, name: str, one_process: Sequence[str], float64: bool
) -> Iterator[Line]:
    """The plan, line by line."""
    count, ranks = len(record.steps), record.world_size
    precision = "float64" if float64 else "the script's own precision"
    headline = f"plan: {name}: {count} {plural(count, 'step')} of {ranks} ranks were recorded"
    yield Line(f"{headline}, in {precision}", Style.LABEL)
    for group in record.groups:
        for number in group:
            yield Line("")
            yield from _step_lines(record, number, reads=number == group[0])
    yield Line("")
    yield from labelled("One process: ", shlex.join(one_process))


def _step_lines(record: Record, number: int, reads: bool) -> Iterator[Line]:
    step = record.step(0, number)
    optimizers = " + ".join(step.optimizers)
    at = f" at {step.stepped_at}" if str(step.stepped_at) else ""
    yield Line(f"  step {number + 1}: {optimizers} steps{at}")
    called = Counter((call.module, str(call.place)) for call in step.calls)
    for (module, place), times in called.items():
        where = f" at {place}" if place else ""
        yield Line(f"    {module} is called{where}, {times} {plural(times, 'time')} by rank 0")
    passes = len(step.losses)
    yield Line(f"    backward runs {passes} {plural(passes, 'time')} on rank 0")
    held = record.reader(0, number).gradient_names("held/")
    more = f"; {step.unnamed} more are in no module that is called" if step.unnamed else ""
    yield Line(f"    {len(held)} gradients are compared{more}")
    if reads:
        yield from (Line(f"    {text}") for text in _fed(record, number))
    if step.draws:
        yield Line("    random numbers are drawn as each rank drew them")


def _fed(record: Record, number: int) -> Iterator[str]:
    """What one process is given instead of what it reads itself."""
    reader = record.reader(0, number)
    if record.feed == "loader":
        what, prefix = "its loader yields", "batch/0/"
    else:
        what, prefix = "its model is called with", "call/0/"
    rows = sum(len(record.counts(rank, (number,))) > 0 for rank in range(record.world_size))
    yield f"{what} the rows of {rows} ranks as one batch; on rank 0 these are:"
    shapes = reader.shapes(prefix)
    for path, shape in list(shapes.items())[:MOST_LEAVES]:
        yield f"  {path or 'a tensor'}: {tuple(shape)}"
    if len(shapes) > MOST_LEAVES:
        yield f"  and {len(shapes) - MOST_LEAVES} more"
