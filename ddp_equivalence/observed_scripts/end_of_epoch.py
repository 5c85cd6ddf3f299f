"""Says that the last step of an epoch was not observed, where it is another one than the rest.

Many scripts are wrong there alone: they divide by a number of micro-batches or rows that this step
does not have, or leave its reduction out.
"""

from __future__ import annotations

from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.report.wrapping import plural


def end_is_not_observed(record: Record) -> str:
    """What is different at the end of an epoch, and how to look at it; "" if it was observed, is
    like the other steps, or is not known.
    """
    if record.feed != "loader" or not record.steps:
        return ""
    first = record.step(0, record.steps[0])
    loader = first.batches[0][0]
    batches, last_rows = first.epoch.batches, first.epoch.last_rows
    each = len(record.counts(0, record.groups[0]))
    numbers = {
        number
        for step in record.steps
        for of, number in record.step(0, step).batches
        if of == loader
    }
    left = batches % each
    if not batches or any((number + 1) % batches == 0 for number in numbers):
        return ""
    if not left and not last_rows:
        return ""
    what = (
        f"{left} {plural(left, 'micro-batch', 'micro-batches')} instead of {each}"
        if left
        else f"a batch of {last_rows} {plural(last_rows, 'row')} instead of {first.batch_counts[0]}"
    )
    before = max(0, (batches - 1) // each - 1) * len(record.groups[0])
    return (
        f"the last step of an epoch, which may have {what}, was not observed: "
        f"--from-step {before} observes it"
    )


def about_epochs(record: Record) -> tuple[str, str]:
    """What ``end_is_not_observed`` says, and how long the loaders of the ranks are, if they differ.
    Each is "" if there is nothing to say.
    """
    lengths = [record.step(rank, 0).epoch.batches for rank in range(record.world_size)]
    each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(lengths))
    apart = (
        f"the loaders of the ranks have different numbers of batches ({each}): at the end of an "
        "epoch, some ranks train without the others, or wait for them for ever"
    )
    return end_is_not_observed(record), apart if len(set(lengths)) > 1 else ""
