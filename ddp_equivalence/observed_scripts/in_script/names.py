"""Names for the modules that a script calls and for their tensors, whatever they are wrapped in.

A script may wrap its model on several ranks and not in one process. Names do not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

INSIDE = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""The class of a wrapper -> the name under which it holds what it wraps."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    while (name := INSIDE.get(type(module).__name__)) is not None and name in module._modules:
        inside = module._modules[name]
        if inside is None:
            break
        module = inside
    return module


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer inside a module, and every tensor that a module of the user's
    keeps as a plain attribute, by a name without wrappers; shared ones once. A view is none: FSDP
    makes such ones of its flat parameters.
    """
    seen: set[int] = set()
    yield from _named(unwrapped(module), "", seen)


def _named(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    own = () if type(module).__module__.startswith("torch.") else vars(module).items()
    kept = [(k, t) for k, t in own if isinstance(t, Tensor) and not t._is_view() and t.is_leaf]
    for name, tensor in (*module._parameters.items(), *module._buffers.items(), *kept):
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"{prefix}{name}", tensor
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _named(unwrapped(child), f"{prefix}{name}.", seen)


class ModuleNames:
    """The names of the modules that the script itself calls, in the order of their first calls:
    ``GPT``, ``Discriminator``, ``Linear`` and ``Linear#1``.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}

    def of(self, module: nn.Module) -> str:
        """The name of a module, which may be wrapped."""
        inside = unwrapped(module)
        if id(inside) not in self._names:
            kind = type(inside).__name__
            count = sum(1 for name in self.modules if name.partition("#")[0] == kind)
            name = f"{kind}#{count}" if count else kind
            self._names[id(inside)] = name
            self.modules[name] = inside  # keeps it alive, so that no other gets its id
        return self._names[id(inside)]

    def learn_parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a module that were not known before, by their full names."""
        new = []
        for inner, tensor in named_tensors(self.modules[name]):
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = f"{name}:{inner}"
                new.append((f"{name}:{inner}", tensor))
        return new

    def of_parameter(self, parameter: Tensor) -> str | None:
        """The full name of a parameter; None if it is in no module that was called."""
        return self._parameters.get(id(parameter))

    def live_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every known parameter that its module still has."""
        for module in self.modules.values():
            for _, tensor in named_tensors(module):
                name = self._parameters.get(id(tensor))
                if name is not None and isinstance(tensor, nn.Parameter):
                    yield name, tensor

    def buffers(self, modules: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The buffers of these modules, by their full names."""
        for name in sorted(modules):
            for inner, tensor in named_tensors(self.modules[name]):
                if not isinstance(tensor, nn.Parameter):
                    yield f"{name}:{inner}", tensor
