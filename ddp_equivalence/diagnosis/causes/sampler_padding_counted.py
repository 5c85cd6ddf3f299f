"""Examples that pad the shards to one length are counted twice."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import examples_read, indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if not examples_read.twice(view) or examples_read.all_the_same(view):
        return ()
    detail = f"{examples_read.numbers(examples_read.twice(view))} more than once"
    return tuple(Way(way.predicted, detail) for way in examples_read.as_read(view))


def sign(view: View) -> Sign | None:
    if view.read is None:
        return None
    twice = examples_read.twice(view)
    return indications.only_if(
        bool(twice),
        f"{examples_read.numbers(twice)} of {view.examples} were read more than once",
        "no example was read twice",
    )


HYPOTHESIS = Hypothesis(
    name="sampler_padding_counted",
    sentence="Examples were read more than once, as a sampler does that pads all shards to one "
    "length, and count each time.",
    look_at="DistributedSampler(drop_last=False) where the data do not divide by the ranks: give "
    "the repeated examples no weight, or use uneven shards with a global mean",
    predict=predict,
    sign=sign,
    tell_apart="a number of examples that the ranks divide: the padding then goes away",
)
