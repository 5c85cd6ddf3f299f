"""Parameters keep the names that they had before the step, whatever the step wraps or renames."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.measurement.flat_parameters import original_parameters
from ddp_equivalence.measurement.returned import no_parameters

WRAPPER_SEGMENTS = frozenset(
    {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
)
"""What DDP, torch.compile, activation checkpointing and FSDP insert into names of parameters."""


class ParameterNames:
    """The names of a model's parameters before its step. A shared parameter has its first name.

    Afterwards ``parameters`` finds the parameters wherever they are now, and ``of_returned`` gives
    their names to what the step returned.
    """

    def __init__(self, model: nn.Module) -> None:
        # No weak references: torch.utils.swap_tensors refuses tensors that have any.
        self._known = dict(model.named_parameters())
        self.shapes = {name: one.shape for name, one in self._known.items()}
        first = {id(one): name for name, one in self._known.items()}
        self._own = {
            name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)
        }
        self._modules = {name: weakref.ref(one) for name, one in model.named_modules()}
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters now, under the names that they had before the step.

        A parameter is recognised by its identity. If the step has replaced it by another, that one
        is recognised by its module, by its name, or else by its place in the order of the model. A
        parameter that the step has added is included if it is trained; its name says so.
        """
        now = dict(original_parameters(model))
        if now.keys() == self._known.keys() and all(
            self._known[name] is parameter for name, parameter in now.items()
        ):
            return now
        names = {id(parameter): name for name, parameter in self._known.items()}
        found = {names[id(one)]: one for one in now.values() if id(one) in names}
        new = {name: one for name, one in now.items() if id(one) not in names}
        for match in (self._by_module, self._by_name, self._by_place):
            free = [name for name in self._known if name not in found]
            for name, own in match(model, new, free).items() if new and free else ():
                if own not in found:
                    found[own] = new.pop(name)
        self._known |= found
        in_order = {name: found[name] for name in self._known if name in found}
        return in_order | {
            f"{name} (added by the step)": one for name, one in new.items() if one.requires_grad
        }

    def _by_module(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        """Parameters of modules that were part of the model before, wherever these are now."""
        paths = self.modules()
        now = dict(model.named_modules(remove_duplicate=False))
        found = {}
        for name in new:
            path, _, last = name.rpartition(".")
            own = ".".join(filter(None, (paths.get(id(now.get(path)), "?"), last)))
            if own in free:
                found[name] = own
        return found

    def _by_name(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        return _matched(new, {name: own for name, own in self._own.items() if own in free})

    def _by_place(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        """Nothing, unless every new parameter has the shape of the one that it stands for."""
        shapes = [self.shapes[name] for name in free]
        same = shapes == [parameter.shape for parameter in new.values()]
        return dict(zip(new, free, strict=True)) if same else {}

    def of_returned(
        self, model: nn.Module, returned: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """What the step returned, under the model's own names and without the model's buffers.

        Names that fit no parameter are kept. Raises TypeError if no name fits any, and ValueError
        if a name fits several parameters, or if two different tensors belong to one parameter.
        """
        if returned.keys() == self._known.keys():
            return dict(returned)
        names = self._matched_as_a_whole(model, returned)
        found: dict[str, Tensor | None] = {}
        taken_from: dict[str, str] = {}
        for name, value in returned.items():
            own = names.get(name, name)
            if own in self.buffers:
                continue
            if own in found and not _equal(found[own], value):
                raise ValueError(
                    f"the step returned two different tensors for the parameter {own}: as "
                    f"{taken_from[own]} and as {name}"
                )
            found[own], taken_from[own] = value, name
        if returned and self._known.keys().isdisjoint(found):
            raise no_parameters(returned, self._known)
        return found

    def first_of(self, name: str) -> str:
        """The first name of the parameter that had this name before the step."""
        return self._own.get(name, name)

    def modules(self) -> dict[int, str]:
        """The id of each module that was part of the model before the step -> its name there."""
        modules = ((path, reference()) for path, reference in self._modules.items())
        return {id(module): path for path, module in modules if module is not None}

    def _matched_as_a_whole(self, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Each name -> the model's own name, by the first way that fits all names.

        They are the names before the step, or the names that the model has now, or either of them
        behind what wrappers of the whole model have put in front. If none of this fits all names,
        each name is matched on its own.
        """
        self.parameters(model)  # recognises parameters that the step has replaced
        held = {id(parameter): name for name, parameter in self._known.items()}
        with_buffers = {name: name for name in self.buffers}
        before = with_buffers | self._own
        after = with_buffers | {
            name: held[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in held
        }
        shorter = {name: name for name in names}
        while True:
            for table in (before, after):
                if all(short in table for short in shorter.values()):
                    return {name: table[short] for name, short in shorter.items()}
            if not all(short.partition(".")[0] in WRAPPER_SEGMENTS for short in shorter.values()):
                return _matched(names, after | before)
            shorter = {name: short.partition(".")[2] for name, short in shorter.items()}


def _matched(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Each name -> the model's own name in ``table``, first of those that stand in it as they
    are, then of those that do so without the segments of wrappers.

    Raises ValueError if a name fits several.
    """
    found = {name: table[name] for name in names if name in table}
    by_bare_name: dict[str, set[str]] = {}
    for name, own in table.items():
        by_bare_name.setdefault(without_wrappers(name), set()).add(own)
    for name in names:
        fitting = set() if name in table else by_bare_name.get(without_wrappers(name), set())
        if len(fitting) > 1:
            raise ValueError(
                f"the name {name} could be {' or '.join(sorted(fitting, key=len))}: return "
                "tensors by the names that the model itself gives its parameters"
            )
        found.update((name, own) for own in fitting)
    return found


def without_wrappers(name: str) -> str:
    """The name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or digest({"": one}) == digest({"": other})
