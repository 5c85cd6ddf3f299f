"""A lane whose ranks never start fails once, if the run gives up lanes."""

from __future__ import annotations

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import CannotRunHere, FailedStarts, Lane

NCCL = Lane("nccl", "nccl", "cuda")
TOO_OLD = "rank 0: RuntimeError: The NVIDIA driver on your system is too old"


def start(starts: FailedStarts, layout: str, error: str = "", lane: Lane = NCCL) -> None:
    """One start of ranks; it fails if there is an ``error``."""
    with starts.noted(lane, parse(layout)):
        if error:
            raise RankFailed(error)


def giving_up() -> settings.Settings:
    return settings.replaced(give_up_lanes=True)


def test_a_lane_that_never_started_is_given_up_with_its_first_error() -> None:
    starts = FailedStarts()
    with settings.using(giving_up()):
        with pytest.raises(RankFailed, match="too old"):
            start(starts, "1x2", f"{TOO_OLD}\nand more lines")
        with pytest.raises(CannotRunHere) as caught:
            start(starts, "2x2")
        assert caught.value.reason == f"no ranks have ever started on this lane: {TOO_OLD}"
        assert (caught.value.lane, caught.value.layout) == ("nccl", "2x2")
        start(starts, "1x2", lane=Lane("gloo_cuda", "gloo", "cuda"))


def test_without_that_setting_every_case_tries_again() -> None:
    starts = FailedStarts()
    assert not settings.Settings().give_up_lanes
    with settings.using(settings.replaced(give_up_lanes=False)):
        for _ in range(2):
            with pytest.raises(RankFailed, match="too old"):
                start(starts, "1x2", TOO_OLD)
        start(starts, "1x2")


def test_a_lane_that_works_gives_up_only_the_layouts_that_do_not() -> None:
    starts = FailedStarts()
    with settings.using(giving_up()):
        start(starts, "1x1")
        with pytest.raises(RankFailed):
            start(starts, "1x4", "hangs")
        with pytest.raises(CannotRunHere, match="ranks on 1x4 have failed to start here: hangs"):
            start(starts, "1x4")
        start(starts, "1x2")


def test_ranks_that_have_started_once_are_never_given_up() -> None:
    starts = FailedStarts()
    with settings.using(giving_up()):
        start(starts, "1x2")
        with pytest.raises(RankFailed):
            start(starts, "1x2", "out of memory")
        start(starts, "1x2")


def test_ranks_on_the_cpu_are_never_given_up() -> None:
    starts, gloo = FailedStarts(), Lane("gloo", "gloo", "cpu")
    with settings.using(giving_up()):
        for _ in range(2):
            with pytest.raises(RankFailed, match="anything"):
                start(starts, "1x2", "anything", lane=gloo)
