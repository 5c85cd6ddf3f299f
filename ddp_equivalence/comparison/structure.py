"""Everything but the values of a gradient: whether there is one, its shape, dtype and form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Description


class Form(Enum):
    """The forms in which the same values can come."""

    ABSENT = "no gradient"
    ZEROS = "a gradient of zeros"
    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True)
class OtherForm:
    """A gradient that has the values of the big batch on these ranks, but another form.

    An optimizer may treat the forms differently: it skips a parameter without a gradient, but
    weight decay and momentum move a parameter whose gradient is zero.
    """

    name: str
    in_big_batch: Form
    on_ranks: Form
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of one gradient. ``zero`` is True if all its elements are zeros.

    ``description`` is None without a gradient. ``named`` is False if not even its name is there.
    """

    description: Description | None
    zero: bool = False
    named: bool = True

    @property
    def is_nothing(self) -> bool:
        """True if there is no gradient, or one of zeros: these count as equal."""
        return self.description is None or self.zero


@dataclass(frozen=True)
class Unlike:
    """A gradient of a rank whose structure is not that of the big batch.

    ``expected`` is None for a name that no parameter of the model has.
    """

    rank: int
    key: GradientKey
    found: Structure
    expected: Structure | None

    @property
    def difference(self) -> str:
        """What differs, as a clause; "" if nothing but the form does."""
        if self.expected is None:
            return "is not a parameter of the model"
        found, right = self.found.description, self.expected.description
        if found is None or right is None:
            if self.found.is_nothing and self.expected.is_nothing:
                return ""
            return f"is {found}, expected {right}" if self.found.named else "is missing"
        if found.shape != right.shape:
            return f"is {found}, expected {right}"
        if found.dtype != right.dtype:
            return f"is {found.dtype_name} instead of {right.dtype_name}"
        return ""

    @property
    def forms(self) -> tuple[Form, Form] | None:
        """The form in the big batch, and the one that was found; None if something else differs."""
        if self.expected is None or self.difference:
            return None
        found, right = self.found.description, self.expected.description
        if found is not None and right is not None:
            forms = Form.SPARSE, Form.DENSE
            return forms if right.is_sparse else forms[::-1]
        one = found or right
        if one is None or not prod(one.shape):
            return None
        return (Form.ABSENT, Form.ZEROS) if right is None else (Form.ZEROS, Form.ABSENT)


def differences(unlike: Iterable[Unlike], label: Callable[[GradientKey], str]) -> tuple[str, ...]:
    """One sentence for every difference, by rank and then in alphabetical order."""
    sentences = (
        (one.rank, f"rank {one.rank}: {label(one.key)} {one.difference}")
        for one in unlike
        if one.difference
    )
    return tuple(sentence for _, sentence in sorted(sentences))


def apart(forms: Iterable[OtherForm], ranks: Iterable[int]) -> Iterator[tuple[OtherForm, str]]:
    """The forms that only some of the ranks have, and what follows from it, as a sentence.

    Weight decay or momentum would move the parameter on these ranks alone.
    """
    every_rank = set(ranks)
    for form in forms:
        if Form.ZEROS in (form.in_big_batch, form.on_ranks) and set(form.ranks) != every_rank:
            listed = ", ".join(map(str, form.ranks))
            noun = "rank" if len(form.ranks) == 1 else "ranks"
            yield (
                form,
                f"{noun} {listed}: {form.name} has {form.on_ranks.value}, and on other ranks "
                f"{form.in_big_batch.value}: an optimizer may move them apart",
            )


def other_forms(unlike: Iterable[Unlike]) -> tuple[OtherForm, ...]:
    """The gradients whose form differs, in any step, and nothing else does."""
    ranks: dict[tuple[str, Form, Form], set[int]] = {}
    for one in unlike:
        if one.forms is not None:
            ranks.setdefault((one.key[1], *one.forms), set()).add(one.rank)
    return tuple(OtherForm(*form, ranks=tuple(sorted(having))) for form, having in ranks.items())
