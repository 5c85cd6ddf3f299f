"""What a rank does while its step runs: what it reads, from which weights, what it wraps and sends.

Looked at only when something differs: the step is then run once more under an ``Observer``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ddp_equivalence.gradients import Selection, digest
from ddp_equivalence.ranks.collectives import Collective, issued_so_far
from ddp_equivalence.ranks.patches import patched

Indices = tuple[int, ...]

MOST_ROWS = 4096
"""Examples of a batch beyond which no ledger is kept."""

MOST_BUCKET_ELEMENTS = 2_000_000
"""Parameters of a model beyond which DDP is not asked for its buckets: it answers with tensors."""


@dataclass(frozen=True)
class Forward:
    """One call of the model with gradients on, in ``step`` (from 0).

    ``examples``: positions in the big batch of the rows that it was called with, in their order;
    None if they are none of the batch's rows. ``weights``: digest of the parameters at that moment.
    ``generator``: state of torch's generator on the CPU; ``seed``: what it was last seeded with.
    """

    examples: Indices | None
    weights: str
    generator: bytes
    seed: int
    step: int


@dataclass(frozen=True)
class Backward:
    """One call of backward, in ``step`` (from 0).

    ``loss``: the value that it began at. ``gradient``: what it gave the parameters on this rank, as
    the selection has it, before anything was reduced; None if it gave nothing. ``forwards``: how
    many there had been before it.
    ``issued``: how many collectives had been issued before it and when it ended; None if torch has
    no flight recorder.
    """

    loss: float | None
    forwards: int
    issued: tuple[int | None, int | None]
    step: int
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Wrapper:
    """One DistributedDataParallel around the model.

    ``synchronised``: of each of its forward passes, whether it was to reduce gradients.
    ``freed``: True if the wrapper was gone when a backward began that it had to reduce.
    ``buckets``: names of the parameters in each bucket, as of the last forward pass.
    ``ignored``: names that it was told not to reduce. ``logged``: what DDP logs of itself.
    """

    synchronised: tuple[bool, ...]
    freed: bool
    buckets: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    logged: Mapping[str, object]


@dataclass(frozen=True)
class Observation:
    """What one rank did in all steps.

    ``frozen``: parameters that required no gradient in the end. ``buffers``: digest of the model's
    buffers in the end. ``collectives``: all it issued, None without a flight recorder.
    ``gradients``: digest of what it left, by name. ``clipped``: norms that torch was told to clip
    to, and how many collectives had been issued by then.
    """

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    wrappers: tuple[Wrapper, ...]
    frozen: tuple[str, ...]
    buffers: str
    gradients: Mapping[str, str]
    clipped: tuple[tuple[float, int | None], ...] = ()
    collectives: tuple[Collective, ...] | None = None

    def read(self, step: int) -> tuple[Indices, ...] | None:
        """The micro-batches of one step: the examples of each backward, None if unknown.

        A backward whose forward passes all read the same examples has read them once.
        """
        found: list[Indices] = []
        begin = 0
        for backward in self.backwards:
            passes = [one.examples for one in self.forwards[begin : backward.forwards]]
            begin = backward.forwards
            if backward.step != step:
                continue
            if any(one is None for one in passes):
                return None
            distinct = dict.fromkeys(one for one in passes if one is not None)
            if passes:
                found.append(tuple(index for one in distinct for index in one))
        return tuple(found) or None


class Observer:
    """Watches one rank's model. ``batch`` is the big batch (all steps joined) that is read;
    ``selection`` says which elements of gradients are kept.

    ``step``: the step that it is at; whoever takes several says so.
    """

    def __init__(self, model: nn.Module, batch: object, selection: Selection) -> None:
        self._model = model
        self._selection = selection
        self._own: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._rows = _Rows(batch)
        self._forwards: list[Forward] = []
        self._backwards: list[Backward] = []
        self._wrappers: list[_Watched] = []
        self._clipped: list[tuple[float, int | None]] = []
        self._inside = False
        self.step = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        listen = torch.compiler.disable(self._on_forward)
        handles = [self._model.register_forward_pre_hook(listen, with_kwargs=True)]
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name in self._selection.sizes:
                # Before it is added to what is there, and before DDP sees it.
                handles.append(parameter.register_hook(partial(self._on_gradient, name)))
        initialise = DistributedDataParallel.__init__
        clip = torch.nn.utils.clip_grad_norm_

        def wrapping(ddp: Any, *arguments: Any, **named: Any) -> None:
            initialise(ddp, *arguments, **named)
            self._wrappers.append(_Watched(ddp, self._names))

        def clipping(parameters: Any, max_norm: float, *arguments: Any, **named: Any) -> Tensor:
            self._clipped.append((float(max_norm), issued_so_far()))
            return clip(parameters, max_norm, *arguments, **named)

        try:
            with (
                patched(DistributedDataParallel, "__init__", wrapping),
                patched(torch.nn.utils, "clip_grad_norm_", clipping),
                patched(torch.autograd, "backward", self._from(torch.autograd.backward)),
                patched(torch.autograd, "grad", self._from(torch.autograd.grad)),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def found(
        self,
        gradients: Mapping[str, Tensor | None],
        collectives: tuple[Collective, ...] | None,
    ) -> Observation:
        """What was seen, with the ``gradients`` that the step left."""
        return Observation(
            forwards=tuple(self._forwards),
            backwards=tuple(self._backwards),
            wrappers=tuple(one.told() for one in self._wrappers),
            frozen=tuple(
                name for name, one in self._model.named_parameters() if not one.requires_grad
            ),
            buffers=digest(dict(self._model.named_buffers())),
            gradients={name: digest({name: one}) for name, one in gradients.items()},
            clipped=tuple(self._clipped),
            collectives=collectives,
        )

    def _on_forward(self, model: nn.Module, *arguments: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._forwards.append(
            Forward(
                examples=self._rows.read(arguments),
                weights=digest(dict(model.named_parameters())),
                generator=torch.get_rng_state().numpy().tobytes(),
                seed=torch.initial_seed(),
                step=self.step,
            )
        )

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        value = self._selection.of_one(name, gradient)
        self._own[name] = self._own[name] + value if name in self._own else value

    def _from(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd.backward`` or ``grad``, watched."""

        def watched(tensors: Any, *arguments: Any, **named: Any) -> Any:
            if self._inside:  # activation checkpointing goes backward within backward
                return differentiate(tensors, *arguments, **named)
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            values = [root.detach() for root in roots if root.numel() == 1]
            for one in self._wrappers:
                one.backward_begins()
            before = issued_so_far()
            self._own = {}
            self._inside = True
            try:
                found = differentiate(tensors, *arguments, **named)
            finally:
                self._inside = False
            self._backwards.append(
                Backward(
                    loss=sum(map(float, values)) if values else None,
                    forwards=len(self._forwards),
                    issued=(before, issued_so_far()),
                    step=self.step,
                    gradient=self._selection.joined(self._own) if self._own else None,
                )
            )
            self._own = {}
            return found

        return watched


class _Watched:
    """One wrapper; held weakly, since a wrapper that is dropped is what is looked for."""

    def __init__(self, ddp: DistributedDataParallel, names: Mapping[int, str]) -> None:
        self._ddp = weakref.ref(ddp)
        self._names = names
        self._synchronised: list[bool] = []
        self._waiting = False
        self._freed = False
        self._buckets: tuple[tuple[str, ...], ...] = ()
        self._logged: dict[str, object] = {}
        self._ignored = tuple(sorted(ddp.parameters_to_ignore))
        ddp.register_forward_pre_hook(torch.compiler.disable(self._on_forward), with_kwargs=True)

    def _on_forward(self, ddp: Any, *arguments: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._synchronised.append(bool(ddp.require_backward_grad_sync))
        self._waiting = True
        if sum(parameter.numel() for parameter in ddp.parameters()) <= MOST_BUCKET_ELEMENTS:
            # No other way tells which parameter is in which bucket.
            self._buckets = tuple(
                tuple(self._names.get(id(parameter), "?") for parameter in bucket.parameters())
                for bucket in ddp.reducer._get_zeros_like_grad_buckets()
            )
        self._logged = {
            name: value
            for name, value in ddp._get_ddp_logging_data().items()
            if name in LOGGED and value not in ("", "N/A")
        }

    def backward_begins(self) -> None:
        """If a forward pass is waiting for it, is the wrapper still there?"""
        self._freed |= self._waiting and self._ddp() is None
        self._waiting = False

    def told(self) -> Wrapper:
        return Wrapper(
            synchronised=tuple(self._synchronised),
            freed=self._freed,
            buckets=self._buckets,
            ignored=self._ignored,
            logged=self._logged,
        )


LOGGED = (
    *("bucket_sizes", "rebuilt_bucket_sizes", "bucket_cap_bytes", "find_unused_parameters"),
    *("static_graph", "gradient_as_bucket_view", "broadcast_buffers", "comm_hook"),
    *("has_sync_bn", "unused_parameter_size", "num_parameter_tensors", "world_size"),
)
"""Of what DDP logs of itself: what can explain a gradient."""


class _Rows:
    """Finds the rows of the big batch in what a model is called with."""

    def __init__(self, batch: object) -> None:
        self._places: list[tuple[tuple[int, ...], torch.dtype, dict[bytes, list[int]]]] = []
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        # Those with most bytes a row first: labels are alike too often.
        for leaf in sorted(leaves, key=lambda one: -one[:1].numel() * one.element_size()):
            if not len(leaf) or len(leaf) > MOST_ROWS:
                continue
            places: dict[bytes, list[int]] = {}
            for index, row in enumerate(_bytes_of_rows(leaf)):
                places.setdefault(row, []).append(index)
            self._places.append((tuple(leaf.shape[1:]), leaf.dtype, places))

    def read(self, arguments: object) -> Indices | None:
        """The positions of the rows of the first argument whose rows are the batch's."""
        tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
        for shape, dtype, places in self._places:
            for tensor in tensors:
                if tensor.ndim == 0 or tuple(tensor.shape[1:]) != shape or tensor.dtype != dtype:
                    continue
                found = [places.get(row) for row in _bytes_of_rows(tensor)]
                if all(found):
                    return _one_place_each([one for one in found if one])
        return None


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    flat = tensor.detach().reshape(len(tensor), -1).cpu().contiguous()
    if not flat.shape[1]:
        return [b""] * len(flat)
    return [row.tobytes() for row in flat.view(torch.uint8).numpy()]


def _one_place_each(places: list[list[int]]) -> Indices:
    """Rows that are alike in the batch are taken in turn."""
    taken: dict[int, int] = {}
    found = []
    for options in places:
        turn = taken.get(options[0], 0)
        taken[options[0]] = turn + 1
        found.append(options[turn % len(options)])
    return tuple(found)
