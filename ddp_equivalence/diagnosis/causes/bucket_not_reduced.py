"""All parameters of some of DDP's buckets kept the rank's own gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if not view.only_some_differ or len(view.ranks) != view.world_size:
        return ()
    right = view.everywhere(view.expected)
    names = ", ".join(sorted(view.differing)[:4])
    detail = names + (", ..." if len(view.differing) > 4 else "")
    ways = []
    for own in view.owns:
        mixed = view.mix(view.of_the_ranks(own), right, view.differing)
        ways.append(Way(mixed, detail))
    if view.seen is None and view.ranks_differ:
        # Whatever each rank's own gradient is: reduced, they would have been the big batch.
        mixed = view.measured - view.measured.mean(0) + view.expected
        ways.append(Way(view.mix(mixed, right, view.differing), detail, informed=True))
    return tuple(ways)


def buckets_concerned(view: View) -> list[tuple[str, ...]] | None:
    """The buckets that the differing parameters fill; None if none, or if that is unknown."""
    for one in indications.wrappers(view):
        concerned = [bucket for bucket in one.buckets if view.differing.intersection(bucket)]
        if concerned and set().union(*concerned) == view.differing:
            return concerned
    return None


def sign(view: View) -> Sign | None:
    if not any(one.buckets for one in indications.wrappers(view)):
        return None
    concerned = buckets_concerned(view)
    if concerned is None:
        return Sign(False, "the parameters that differ are no whole buckets")
    if all(len(bucket) == 1 for bucket in concerned):
        return None
    return Sign(True, f"they are {len(concerned)} whole bucket{'s'[: len(concerned) != 1]} of DDP")


HYPOTHESIS = Hypothesis(
    name="bucket_not_reduced",
    sentence="The gradients of a whole bucket were not reduced: every rank holds its own there.",
    look_at="a communication hook that returns a bucket as it came, or a bucket that never becomes "
    "ready, because one of its parameters gets no gradient",
    predict=predict,
    sign=sign,
    tell_apart="buckets of several parameters (a larger bucket_cap_mb)",
)
