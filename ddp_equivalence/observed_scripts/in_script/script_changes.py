"""Changes what a script computes or writes while it is observed: files, precision, dropout."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.batch_tree import leaves_of, map_tensors
from ddp_equivalence.observed_scripts.in_script.around import after, around
from ddp_equivalence.observed_scripts.in_script.kept_tensors import named_tensors
from ddp_equivalence.observed_scripts.record import in_float64
from ddp_equivalence.ranks.users_line import counts_as_torch

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
