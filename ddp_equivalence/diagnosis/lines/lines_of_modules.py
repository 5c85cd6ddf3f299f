"""The lines of a forward pass or a loss that cause a difference without being wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

BATCH_NORMS = ("BatchNorm", "batch_norm")
DROPOUTS = ("Dropout", "dropout", "MultiheadAttention", "RNN", "LSTM", "GRU")
STATISTICS = ("Var", "Std", "Cov", "Corrcoef", "Mm", "Mean")
COMPARISONS = ("Mm", "Bmm", "Baddbmm", "Cdist", "EuclideanDist", "CosineSimilarity", "LogSoftmax")

MOST_DRAWS = 2
"""So many lines that draw random numbers are shown."""

PROPERTY = "a property of the {}, no fault"


def module_lines(
    view: View, words: Sequence[str], note: str, is_property: bool = True
) -> Sequence[PointedLine]:
    """The line of the forward pass that first called a module whose class has one of the words.

    ``note``: what the module did.
    """

    def is_one(call: Call) -> bool:
        return any(word in call.what for word in words)

    pointed = []
    for place in view.observed.calls.places(Kind.MODULE, where=is_one)[:1]:
        name = f" {place.names[0]}" if place.names else ""
        text = f"{place.first.what}{name} {note}"
        if is_property:
            text += f": {PROPERTY.format('model')}"
        pointed.append(place.pointed(text, is_fault=True))
    return pointed


def draw_lines(view: View, note: str) -> Sequence[PointedLine]:
    """The lines before backward under which random numbers were drawn, other than to shuffle.

    Those in a forward pass of the model come first. ``note``: which numbers they draw.
    """
    calls = view.observed.calls
    shuffles = {
        place.line
        for place in calls.places(Kind.SHUFFLE, Kind.SAMPLER, Kind.LOADER, Kind.NEW_GROUP)
    }
    places = calls.places(Kind.DRAW)
    places.sort(key=lambda place: not place.first.value)
    return [place.pointed(note, is_fault=True) for place in places if place.line not in shuffles][
        :MOST_DRAWS
    ]


def loss_lines(view: View, functions: Sequence[str], note: str) -> Sequence[PointedLine]:
    """The line of the loss that used the first of these functions of autograd that any line used.

    Without one, the line that computed what backward began at. ``note``: what the line takes.
    """
    places = view.observed.calls.places(Kind.LOSS_FUNCTIONS)
    text = f"{note}: {PROPERTY.format('loss')}"
    for function in functions:
        for place in places:
            used = {name.rstrip("0123456789") for name in place.first.what.split()}
            if function in used:
                return [place.pointed(text, is_fault=True)]
    return [place.pointed(text, is_fault=True) for place in places[:1]]
