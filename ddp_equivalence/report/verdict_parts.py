"""Small parts of a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Observation

Differs = Literal["count", "gradients", "weights", "afterwards"]
"""What is wrong first in a step that trains: how often optimizers step; the gradients with which
one steps; the weights after its step, although its gradients were right; or the weights at the end,
although they were right after every step."""


@dataclass(frozen=True)
class WrongStep:
    """The first step of an optimizer that is not that of the big batch.

    ``number``: counted from 1; None unless ``differs`` is "gradients" or "weights". ``made``: how
    many steps each rank makes, in the order of the ranks. ``expected``: how many the reference
    makes.
    """

    number: int | None
    differs: Differs
    made: tuple[int, ...]
    expected: int

    @property
    def headline(self) -> str:
        """The same in a few words."""
        if self.differs == "count":
            return "the optimizer makes another number of steps"
        if self.differs == "afterwards":
            return "the weights are changed after the last step"
        return f"step {self.number} has wrong {self.differs}"

    @property
    def sentence(self) -> str:
        """What is wrong, as a sentence of the report."""
        if self.differs == "count":
            made = sorted(set(self.made))
            counts = " or ".join(map(str, made))
            times = "step" if made == [1] else "steps"
            return (
                f"The optimizer makes {counts} {times}, and the reference makes {self.expected}: "
                "the same number must be made for the same examples."
            )
        of = f"optimizer step {self.number} of {self.expected}"
        if self.differs == "gradients":
            return f"The gradients of {of} are wrong; until then all weights were right."
        if self.differs == "weights":
            return (
                f"The gradients of {of} are right, and the weights after it are not: the "
                "optimizer, learning rate, schedule or clipping is not that of the reference."
            )
        return (
            "The weights are right after each step of the optimizer, and something changes them "
            "afterwards."
        )


def lines_of_wrong_step(
    wrong: WrongStep, observed: Mapping[int, Observation]
) -> Iterator[PointedLine]:
    """The line whose step is wrong although its gradients are right, or that steps too often."""
    for seen in observed.values():
        stepping = [one.line for one in seen.calls if one.kind is Kind.OPTIMIZER_STEP and one.line]
        if wrong.differs == "count" and stepping:
            yield PointedLine(stepping[-1], "this is where an optimizer steps")
        elif wrong.number is not None and len(stepping) >= wrong.number:
            note = f"step {wrong.number}: the weights after it are wrong"
            yield PointedLine(stepping[wrong.number - 1], note)
        return
