"""What one rank does in a trial of an edited step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ddp_equivalence.measurement.edited_code import CannotEdit, EditedCode, run_as_edited
from ddp_equivalence.measurement.kept_inside import kept_inside
from ddp_equivalence.measurement.locals_seen import LocalsSeen
from ddp_equivalence.measurement.on_rank import run
from ddp_equivalence.measurement.work import Work
from ddp_equivalence.ranks.rank import Rank


@dataclass(frozen=True)
class Trial:
    """The step is run with ``edited`` code and may change nothing outside its process.

    None: it is run as it is, and what it runs is recorded.
    """

    work: Work
    edited: EditedCode | None = None


@dataclass(frozen=True)
class TrialFailed:
    """The step raised an exception on the rank, which can work on.

    ``what``: its type and text. ``acted_outside``: what the step would have done outside its
    process; "" if nothing. ``was_edited``: False if the edit could not be made, and nothing ran.
    """

    what: str
    acted_outside: str = ""
    was_edited: bool = True


def run_trial(rank: Rank, trial: Trial) -> Iterator[object]:
    """Yield what ``on_rank.run`` yields, or one TrialFailed.

    Without an edit, a LocalsSeen comes first.
    """
    failed: TrialFailed | None = None
    results: list[object] = []
    seen = LocalsSeen()
    block: AbstractContextManager[None] = seen.watching()
    if trial.edited is not None:
        case = trial.work.case
        block = run_as_edited(trial.edited, (trial.work.step, case.loss, case.model))
    with kept_inside() as prevented:
        try:
            with block:
                results += run(rank, trial.work)
        except CannotEdit as error:
            failed = TrialFailed(str(error), was_edited=False)
        except Exception as error:
            failed = TrialFailed(f"{type(error).__name__}: {error}")
            traceback.clear_frames(error.__traceback__)
    if prevented:
        failed = TrialFailed("it would act outside its process", prevented[0])
    if trial.edited is None:
        yield seen
    if failed is not None:
        yield failed
    else:
        yield from results
