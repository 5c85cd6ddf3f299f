"""Replaces a few functions of torch in the process of an observed script, and tells a Watch."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_equivalence.case.batch_tree import leaves_of, map_tensors
from ddp_equivalence.measurement.calls import lines_of
from ddp_equivalence.observed_scripts.in_script.around import after, around
from ddp_equivalence.observed_scripts.in_script.kept_tensors import named_tensors
from ddp_equivalence.observed_scripts.in_script.loaders import watch_loaders
from ddp_equivalence.observed_scripts.record import in_float64
from ddp_equivalence.ranks.users_line import counts_as_torch

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch


# What the script computes stays as it is. Frames of the replacements count as torch's own.

_inside = threading.local()


def install(watch: Watch) -> None:
    """Let ``watch`` be told of everything from now on."""
    _watch_wrappers(watch)
    _watch_modules(watch)
    watch_loaders(watch)
    _watch_backward(watch)
    _watch_optimizers(watch)
    _watch_clipping(watch)
    _watch_loss_scales(watch)


def _watch_wrappers(watch: Watch) -> None:
    def wrapped(ddp: Any) -> None:
        watch.wrapped.append((ddp, lines_of(sys._getframe())))

    def not_synchronised(ddp: Any) -> None:
        watch.no_sync_at = lines_of(sys._getframe())

    after(DistributedDataParallel, "__init__", wrapped)
    after(DistributedDataParallel, "no_sync", not_synchronised)


def _watch_modules(watch: Watch) -> None:
    call = nn.Module.__call__

    @counts_as_torch
    def watched(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or getattr(_inside, "module", False)
            or isinstance(self, torch.jit.ScriptModule)
            or not watch.is_on()
        ):
            return call(self, *arguments, **named)
        _inside.module = True
        by_all: Any = nn.Module.__call__
        try:
            arguments, named = watch.before_call(self, arguments, named)
            # A closer look that has begun just now has replaced it, and is told of this call too.
            now: Any = nn.Module.__call__
            result = (call if now is by_all else now)(self, *arguments, **named)
        finally:
            _inside.module = False
        watch.after_call(result)
        return result

    nn.Module.__call__ = watched  # type: ignore[method-assign]


def _watch_backward(watch: Watch) -> None:
    def backward(call: Any, *arguments: Any, **named: Any) -> Any:
        if getattr(_inside, "backward", False) or not watch.is_on():
            return call(*arguments, **named)
        tensors = arguments[0] if arguments else named["tensors"]
        watch.before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
        _inside.backward = True
        try:
            return call(*arguments, **named)
        finally:
            _inside.backward = False
            watch.after_backward()

    around(torch.autograd, "backward", backward)


def _watch_optimizers(watch: Watch) -> None:
    def before_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not watch.is_on() or isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return None  # accelerate's wrapper calls the optimizer inside
        closure = named.get("closure") or (arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            watch.optimizer_steps(optimizer)
            return None

        @functools.wraps(closure)
        def then_steps(*of_closure: Any, **named_of_closure: Any) -> Any:
            """Lightning goes forward and backward inside the optimizer's step."""
            result = closure(*of_closure, **named_of_closure)
            watch.optimizer_steps(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": then_steps}
        return (arguments[0], then_steps, *arguments[2:]), named

    register_optimizer_step_pre_hook(before_step)


def _watch_clipping(watch: Watch) -> None:
    from torch.nn.utils import clip_grad

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        signature = inspect.signature(getattr(clip_grad, name))

        def clipped(
            clip: Any, *arguments: Any, signature: inspect.Signature = signature, **named: Any
        ) -> Any:
            if not watch.is_on():
                return clip(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            first, second = list(signature.parameters)[:2]
            if not isinstance(bound.arguments[first], Tensor):
                bound.arguments[first] = list(bound.arguments[first])
            watch.before_clip()
            result = clip(*bound.args, **bound.kwargs)
            watch.after_clip(float(bound.arguments[second]), result)
            return result

        around(clip_grad, name, clipped)
        setattr(torch.nn.utils, name, getattr(clip_grad, name))


def _watch_loss_scales(watch: Watch) -> None:
    def scaled(scaler: Any) -> None:
        if watch.is_on() and scaler.is_enabled():
            watch.loss_scale, watch.gradients_are_scaled = float(scaler.get_scale()), True

    def unscaled(scaler: Any) -> None:
        watch.gradients_are_scaled &= not scaler.is_enabled()

    def stepped(step: Any, scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        before = watch.steps_seen
        result = step(scaler, optimizer, *arguments, **named)
        if watch.is_on() and scaler.is_enabled() and watch.steps_seen == before:
            watch.step_was_skipped()
        return result

    after(torch.amp.GradScaler, "scale", scaled)
    after(torch.amp.GradScaler, "unscale_", unscaled)
    around(torch.amp.GradScaler, "step", stepped)


# Keeps the user's files as they are, while a script runs in a copy of its folder made of links.
#
# Python announces every file that it opens. A link that is about to be written through is
# replaced by a copy of its file first. Source: docs.python.org/3/library/audit_events.html.

WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT


def keep_files(folder: str) -> None:
    """From now on, no link in this folder is written through."""
    inside = os.path.join(os.path.realpath(folder), "")

    def before_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(one in mode for one in "wax+") if isinstance(mode, str) else flags & WRITES
            if writes and isinstance(path, str | bytes | os.PathLike):
                own_copy(os.fsdecode(path), inside)

    sys.addaudithook(before_open)

    def saved(save: Any, obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(f, str | os.PathLike):
            own_copy(os.fsdecode(f), inside)  # torch writes such files without Python
        save(obj, f, *arguments, **named)

    around(torch, "save", saved)


def own_copy(path: str, inside: str) -> None:
    """If the path is a link to a file in the folder, put a copy of the file in its place."""
    if not os.path.islink(path):
        return
    folder = os.path.join(os.path.realpath(os.path.dirname(path) or "."), "")
    if not folder.startswith(inside):
        return
    target = os.path.realpath(path)
    os.unlink(path)
    if os.path.isfile(target):
        shutil.copyfile(target, path)


# Lets an observed script drop nothing.

DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
)

DROPOUT_P = 4
"""The place of the probability among the arguments of scaled_dot_product_attention."""


def drop_nothing() -> None:
    """Every dropout of torch returns its input, also that of attention and of recurrent layers."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return input

    for name in DROPOUTS:
        setattr(functional, name, dropout)
    of_torch: Any = torch
    of_torch.dropout = dropout

    def without_dropout(attention: Any, *arguments: Any, **named: Any) -> Any:
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        if len(arguments) > DROPOUT_P:
            arguments = (*arguments[:DROPOUT_P], 0.0, *arguments[DROPOUT_P + 1 :])
        return attention(*arguments, **named)

    around(functional, "scaled_dot_product_attention", without_dropout)
    after(nn.RNNBase, "__init__", lambda layer: setattr(layer, "dropout", 0.0))


# Lets one process pack sequences that every rank has sorted by their lengths.


def let_sequences_be_unsorted() -> None:
    """``pack_padded_sequence`` asks for sorted sequences by default; joined ones are not sorted."""
    from torch.nn.utils import rnn

    def packed(pack: Any, input: Tensor, lengths: Any, *arguments: Any, **named: Any) -> Any:
        named = {"batch_first": any(arguments[:1]), **named, "enforce_sorted": False}
        return pack(input, lengths, **named)

    around(rnn, "pack_padded_sequence", packed)


# Lets an observed script compute in float64.

RANKS = 2
"""So many ranks are assumed on this machine, if the launcher does not say how many there are."""

BYTES_PER_ELEMENT = 8 * 3
"""Bytes that training takes in float64: the weight, its gradient, and its place in DDP's bucket."""


def batch_in_float64(batch: Any) -> Any:
    """The batch with its floats in float64; the same object if they all are already."""
    tensors = (leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))
    if all(in_float64(tensor) is tensor for tensor in tensors):
        return batch
    return map_tensors(in_float64, batch)


def to_float64(module: nn.Module) -> None:
    """Convert the module, if it has floats of less than float64."""
    if any(in_float64(tensor) is not tensor for _, tensor in named_tensors(module)):
        module.double()


def compute_in_float64() -> None:
    """New tensors are in float64, and so is a model before it is wrapped.

    A model that does not fit into the memory in float64 makes the script end with a MemoryError.
    """
    torch.set_default_dtype(torch.float64)
    require_memory()

    def wrapped(
        initialise: Any, ddp: Any, module: nn.Module, *arguments: Any, **named: Any
    ) -> None:
        initialise(ddp, module.double(), *arguments, **named)

    around(DistributedDataParallel, "__init__", wrapped)


def require_memory() -> None:
    """Raise MemoryError as soon as the parameters that were made do not fit on all ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or RANKS)
    most = psutil.virtual_memory().available / (ranks * BYTES_PER_ELEMENT)
    made = 0

    def registered(register: Any, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal made
        register(module, name, param)
        if param is not None and param.device.type == "cpu":
            made += param.numel()
            if made > most:
                raise MemoryError(f"{made:,} parameters do not fit into the memory in float64")

    around(nn.Module, "register_parameter", registered)


# Lets the dropout inside recurrent layers draw from torch's own generator, on a GPU too.
#
# There cuDNN drops with a generator of its own, whose state can neither be read nor set. Without
# cuDNN, torch computes the same layers with its own kernels.


def let_torch_draw(module: nn.Module) -> None:
    """Leave cuDNN out of the layers of a module that drop something on a GPU.

    Layers are changed one by one, since a class whose method is replaced cannot be scripted.
    """
    for layer in module.modules():
        drops = isinstance(layer, nn.RNNBase) and layer.dropout
        if drops and next(layer.parameters()).is_cuda and "forward" not in vars(layer):
            layer.forward = functools.partial(_without_cudnn, layer.forward)


@counts_as_torch
def _without_cudnn(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return forward(*arguments, **named)
