"""The lines that decide which examples each rank reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Contents, Kind


def samplers(view: View) -> list[Place]:
    """The lines that made a DistributedSampler."""
    return view.observed.calls.places(Kind.SAMPLER)


def loaders(view: View) -> list[Place]:
    """The lines that made a DataLoader."""
    return view.observed.calls.places(Kind.LOADER)


def data_collectives(view: View) -> list[Place]:
    """The lines that exchanged other tensors than those of the model before the first forward."""
    return view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            call.backwards == 0
            and not call.in_backward
            and call.collective is not None
            and call.collective.contents is Contents.OTHER
            and call.collective.elements > 1
        ),
    )


def reads(view: View) -> list[Place]:
    """The lines that first held what the model was called with."""
    return view.observed.calls.places(Kind.READ)


def read_at(view: View, place: Place, rank: int) -> list[int]:
    """The examples of this step that a rank read at this place, in their order."""
    first = view.setting.first_example
    return [one - first for call in place.by_rank.get(rank, ()) for one in call.examples]


def padding_of(place: Place) -> int:
    """By how many examples the samplers of this line pad the data set; 0 if they do not."""
    length, ranks = int(place.first.value or 0), _replicas(place)
    if "drop_last=False" not in place.first.what or not length or not ranks:
        return 0
    return math.ceil(length / ranks) * ranks - length


def dropped_by(place: Place) -> int:
    """How many examples the samplers of this line leave out of the data set."""
    length, ranks = int(place.first.value or 0), _replicas(place)
    if "drop_last=True" not in place.first.what or not length or not ranks:
        return 0
    return length % ranks


def last_batch_of(view: View, place: Place) -> int:
    """How many examples the loaders of this line leave out, since they do not fill a batch.

    0 if that is not known.
    """
    text, length = place.first.what, int(place.first.value or 0)
    size = _number_after("batch_size=", text)
    if "drop_last=True" not in text or not size:
        return 0
    if "sampler=DistributedSampler" in text:
        for sampler in samplers(view)[-1:]:
            ranks = _replicas(sampler)
            length = (length + padding_of(sampler) - dropped_by(sampler)) // max(1, ranks)
    elif "sampler=" in text:
        return 0
    return length % size


def _replicas(place: Place) -> int:
    return _number_after("num_replicas=", place.first.what)


def _number_after(word: str, text: str) -> int:
    """The whole number that follows a word; 0 if there is none."""
    _, _, after = text.partition(word)
    digits = after.partition(",")[0].rstrip(")")
    return int(digits) if digits.isdigit() else 0


def ranks_that_read(view: View, place: Place, examples: Sequence[int]) -> list[int]:
    """The ranks that read one of these examples at this place."""
    return [rank for rank in place.ranks if set(examples) & set(read_at(view, place, rank))]


def what_was_read(view: View, place: Place, most: int = 3) -> str:
    """The examples that each rank read at this place; "" if they are not known."""
    shown = []
    for rank in place.ranks[:most]:
        examples = sorted(set(read_at(view, place, rank)))
        if not examples:
            return ""
        shown.append(f"rank {rank} reads {_short(examples)}")
    return "; ".join(shown) + ("; ..." if len(place.ranks) > most else "")


def _short(examples: Sequence[int]) -> str:
    if len(examples) > 2 and list(examples) == list(range(examples[0], examples[-1] + 1)):
        return f"{examples[0]} to {examples[-1]}"
    return example_numbers(examples, most=4).partition(" ")[2]
