"""Lines of the user's own code that did something with the model, its data or its optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """A line of the user's code. ``file`` is empty where none is known."""

    file: str = ""
    number: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}" if self.file else ""


@dataclass(frozen=True)
class EarlierPlaces:
    """What the script did before a step: each is an empty place where no line was seen.

    ``optimizer``: made the optimizer that stepped. ``loader``: made the loader from which the step
    read first. ``cleared``: called zero_grad since the step before. ``loaded``: the name of a
    module -> the last line that loaded its weights. ``buffers``: the name of a buffer -> the line
    in the class of its module that assigns it, if there is only one; an empty place if not.
    ``scheduled``: stepped a scheduler of the optimizer last. ``state_loaded``: loaded the state of
    the optimizer. ``steps_with``: its options and state, see ``optimizer_states``.
    """

    optimizer: Place = field(default_factory=Place)
    loader: Place = field(default_factory=Place)
    cleared: Place = field(default_factory=Place)
    loaded: Mapping[str, Place] = field(default_factory=dict)
    buffers: Mapping[str, Place] = field(default_factory=dict)
    scheduled: Place = field(default_factory=Place)
    state_loaded: Place = field(default_factory=Place)
    steps_with: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EarlierPlaces:
        """What ``dataclasses.asdict`` made of it."""
        return cls(
            optimizer=Place(**raw["optimizer"]),
            loader=Place(**raw["loader"]),
            cleared=Place(**raw["cleared"]),
            loaded={name: Place(**place) for name, place in raw["loaded"].items()},
            buffers={name: Place(**place) for name, place in raw["buffers"].items()},
            scheduled=Place(**raw["scheduled"]),
            state_loaded=Place(**raw["state_loaded"]),
            steps_with=raw["steps_with"],
        )
