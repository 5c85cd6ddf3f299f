"""Some examples of the big batch were read by no rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnoses import reading, signs
from ddp_equivalence.diagnoses.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnoses.view import View


def predict(view: View) -> Sequence[Way]:
    if view.read is None or reading.twice(view) or not reading.never(view):
        return ()
    detail = f"without {reading.numbers(reading.never(view))}"
    return tuple(Way(way.predicted, detail) for way in reading.as_read(view))


def sign(view: View) -> Sign | None:
    if view.read is None:
        return None
    never = reading.never(view)
    return signs.only_if(
        bool(never),
        f"{reading.numbers(never)} of {view.examples} were read by no rank",
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
