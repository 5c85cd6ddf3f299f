"""Remembers which line of the script has frozen a parameter, until the model is first trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ddp_equivalence.observed_scripts.in_script.caller import place_of_caller
from ddp_equivalence.observed_scripts.in_script.places_of_objects import PlacesOfObjects
from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.ranks.torch_frames import counts_as_torch

FLAG, METHOD = "requires_grad", "requires_grad_"


class FrozenParameters:
    """Watches from the beginning until ``forget``: then code that is compiled meets parameters as
    they always are.
    """

    def __init__(self) -> None:
        self._places = PlacesOfObjects()
        flag, method = getattr(Tensor, FLAG), getattr(Tensor, METHOD)

        @counts_as_torch
        def assigned(parameter: Tensor, value: bool) -> None:
            flag.__set__(parameter, value)
            self._note(parameter)

        @counts_as_torch
        def called(parameter: Tensor, *arguments: Any, **named: Any) -> Tensor:
            method(parameter, *arguments, **named)
            self._note(parameter)
            return parameter

        setattr(nn.Parameter, FLAG, property(flag.__get__, assigned))
        setattr(nn.Parameter, METHOD, called)

    def forget(self) -> None:
        """End watching. What was seen stays known."""
        for name in (FLAG, METHOD):
            if name in vars(nn.Parameter):
                delattr(nn.Parameter, name)

    def place_of(self, parameter: Tensor) -> Place:
        """The line that has frozen it; an empty place if none was seen."""
        return self._places.of(parameter)

    def _note(self, parameter: Tensor) -> None:
        place = Place() if parameter.requires_grad else place_of_caller()
        self._places.note(parameter, place)
