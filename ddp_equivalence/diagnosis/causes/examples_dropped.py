"""Some examples of the big batch were read by no rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import examples_read, indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.read is None or examples_read.twice(view) or not examples_read.never(view):
        return ()
    detail = f"without {examples_read.numbers(examples_read.never(view))}"
    return tuple(Way(way.predicted, detail) for way in examples_read.as_read(view))


def sign(view: View) -> Sign | None:
    if view.read is None:
        return None
    never = examples_read.never(view)
    return indications.only_if(
        bool(never),
        f"{examples_read.numbers(never)} of {view.examples} were read by no rank",
        "every example was read",
    )


HYPOTHESIS = Hypothesis(
    name="examples_dropped",
    sentence="Some examples of the big batch were read by no rank.",
    look_at="drop_last, a sampler or a slice whose length is rounded down, a filter on one rank",
    predict=predict,
    sign=sign,
    tell_apart="a number of examples that the ranks divide: nothing is then dropped",
)
