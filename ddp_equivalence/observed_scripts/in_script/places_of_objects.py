"""Remembers which line did something with an object, for as long as the object lives."""

from __future__ import annotations

import weakref
from typing import Any

from ddp_equivalence.observed_scripts.places import Place


class PlacesOfObjects:
    """Remembers a line for each of some objects, which a user's class may have made unhashable."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}

    def note(self, one: Any, place: Place) -> None:
        """Remember this line from now on."""
        self._places[id(one)] = weakref.ref(one), place

    def of(self, one: Any) -> Place:
        """The line of this object; an empty place if none is known."""
        known, place = self._places.get(id(one), (None, Place()))
        return place if known is not None and known() is one else Place()
