"""Remembers which lines made the optimizer and the loader, loaded weights and cleared gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from ddp_equivalence.observed_scripts.in_script.buffer_lines import line_that_assigns
from ddp_equivalence.observed_scripts.in_script.caller import place_of_caller
from ddp_equivalence.observed_scripts.in_script.fetched import digest
from ddp_equivalence.observed_scripts.in_script.names import ModuleNames, named_tensors
from ddp_equivalence.observed_scripts.in_script.places_of_objects import PlacesOfObjects
from ddp_equivalence.observed_scripts.places import EarlierPlaces, Place
from ddp_equivalence.ranks.torch_frames import counts_as_torch


class EarlierLines:
    """Watches from the beginning. ``cleared``: the line that called zero_grad last before the last
    ``step_ends``.
    """

    def __init__(self) -> None:
        self.cleared = self._cleared = Place()
        self._made, self._loaded = PlacesOfObjects(), PlacesOfObjects()
        self._scheduled, self._of_state = PlacesOfObjects(), PlacesOfObjects()
        self._steps_with: dict[str, str] = {}
        after(Optimizer, "__init__", self._note_made)
        after(DataLoader, "__init__", self._note_made)
        after(nn.Module, "load_state_dict", self._note_loaded)
        after(Optimizer, "load_state_dict", lambda one: self._of_state.note(one, place_of_caller()))
        for kind in vars(lr_scheduler).values():
            if "step" in getattr(kind, "__dict__", {}):
                after(kind, "step", self._note_scheduled)
        after(Optimizer, "zero_grad", self._note_cleared)
        after(nn.Module, "zero_grad", self._note_cleared)

    def step_ends(self) -> None:
        """The first optimizer of a step is about to step: what was cleared before belongs to it."""
        self.cleared, self._cleared, self._steps_with = self._cleared, Place(), {}

    def places(self, optimizer: Any, loader: Any, names: ModuleNames) -> EarlierPlaces:
        """What is known when this optimizer steps. ``loader``: None if the step read from none."""
        self._steps_with |= dict(_steps_with(optimizer, names))
        return EarlierPlaces(
            optimizer=self._made.of(optimizer),
            loader=self._made.of(loader),
            cleared=self.cleared,
            loaded={
                name: place
                for name, module in names.modules.items()
                if (place := self._loaded_at(module)).file
            },
            buffers={
                f"{name}:{buffer}": line_that_assigns(module, buffer) or Place()
                for name, module in names.modules.items()
                for buffer, tensor in named_tensors(module)
                if not isinstance(tensor, nn.Parameter)
            },
            scheduled=self._scheduled.of(optimizer),
            state_loaded=self._of_state.of(optimizer),
            steps_with=self._steps_with,
        )

    def _note_made(self, made: Any) -> None:
        self._made.note(made, place_of_caller(made))

    def _note_loaded(self, module: nn.Module) -> None:
        place = place_of_caller()
        for one in module.modules():  # the module may be a wrapper around the model
            self._loaded.note(one, place)

    def _loaded_at(self, module: nn.Module) -> Place:
        """The line that loaded the weights of this module, or else of a part of it."""
        places = map(self._loaded.of, module.modules())
        return next((place for place in places if place.file), Place())

    def _note_scheduled(self, scheduler: Any) -> None:
        self._scheduled.note(scheduler.optimizer, place_of_caller())

    def _note_cleared(self, owner: Any) -> None:
        self._cleared = place_of_caller()


def after(kind: type[Any], name: str, then: Callable[[Any], None]) -> None:
    """Let ``then`` be called with the object after each call of this method of a class."""
    method = getattr(kind, name)

    @functools.wraps(method)
    @counts_as_torch
    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        then(self)
        return result

    setattr(kind, name, watched)


def _steps_with(optimizer: Any, names: ModuleNames) -> Iterator[tuple[str, str]]:
    """What decides how an optimizer steps beside its gradients, as names and texts."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for key, value in group.items():
            if isinstance(value, int | float | str | Tensor | tuple):
                yield f"{key} of group {number}", _text(value)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                if not hasattr(value, "full_tensor"):  # a shard differs between ranks
                    yield f"{key} of {names.of_parameter(parameter)}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest(value) if value.numel() > 1 else f"{value.item():.6g}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
