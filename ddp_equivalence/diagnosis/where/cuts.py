"""Where gradients end on their way back, as the operations of a step show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.where.loss import READ_BY_PYTHON, losses_of
from ddp_equivalence.diagnosis.where.relations import KnownValues
from ddp_equivalence.measurement.calls import CodeLine, Operation, Operations, Value

NAMES = {
    READ_BY_PYTHON: "item",
    "alias": "detach",
    "constant_pad_nd": "pad",
    "lift_fresh": "tensor",
    "native_batch_norm": "batch_norm",
    "native_layer_norm": "layer_norm",
    "_to_copy": "to",
    "addmm": "linear",
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_tensor_": "reduce_scatter_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
}
"""The names under which users know operations that torch calls otherwise."""

MOST_CUTS = 3


@dataclass(frozen=True)
class Cut:
    """``ended``: was given something that has a gradient, and what it returned has none. ``value``:
    with what the way to a loss goes on. ``is_leaf``: it was made to require a gradient of its own.
    """

    ended: Operation
    value: Value | None
    is_leaf: bool = False


def cuts_of(run: Operations) -> tuple[Cut, ...]:
    """Where gradients end on the way back from the losses of a run, each line once."""
    found: dict[tuple[CodeLine | None, bool], Cut] = {}
    for one in sorted(_cuts(run), key=lambda pair: pair[0]):
        cut = one[1]
        if cut.ended.line is not None:
            found.setdefault((cut.ended.line, cut.is_leaf), cut)
    return tuple(found.values())


def _cuts(run: Operations) -> Iterator[tuple[int, Cut]]:
    operations = run.operations
    read = {
        float(run.values[one.given[0]].tensor): number
        for number, one in enumerate(operations)
        if one.name == READ_BY_PYTHON and one.differentiable and one.given[0] is not None
    }
    made: dict[int, int] = {}
    for number, one in enumerate(operations):
        for value in one.returned if one.differentiable and not one.in_backward else ():
            if value is None or not run.values[value].is_floating_point:
                continue  # what is chosen by a maximum is a whole number, and has no gradient
            if prod(run.values[value].shape) > 1:
                made.setdefault(value, number)
    open_ones = [one for one in losses_of(run) if one is not None]
    seen: set[int] = set()
    while open_ones:
        number = open_ones.pop()
        if number in seen:
            continue
        seen.add(number)
        used = operations[number]
        for by in used.numbers:
            if by in read and read[by] < number and abs(by) not in (0.0, 1.0):
                yield read[by], Cut(operations[read[by]], None)
        for value, writer, required, leaf in zip(
            used.given, used.writers, used.required, used.leaves, strict=True
        ):
            held = None if value is None else run.values[value]
            is_recorded = writer is not None and operations[writer].differentiable
            if used.recorded and not required and value in made and not is_recorded:
                copy = operations[made[value]] if writer is None else operations[writer]
                yield made[value], Cut(copy, held)  # Python or numpy has made it again
                continue
            if writer is None or operations[writer].in_backward:
                continue
            ended = operations[writer]
            is_floating = held is None or held.is_floating_point
            if required and leaf:
                if _has_inner(ended):
                    yield writer, Cut(ended, held, is_leaf=True)
            elif not used.recorded:  # inside a function with a backward of its own
                if required or not ended.recorded:
                    open_ones.append(writer)
            elif not required and ended.differentiable and is_floating:
                yield writer, Cut(ended, held)
            else:
                open_ones.append(writer)


def _has_inner(operation: Operation) -> bool:
    """True if an operation was given something that was computed from what has a gradient."""
    pairs = zip(operation.required, operation.leaves, strict=True)
    return any(required and not leaf for required, leaf in pairs)


def not_meant(
    cuts: Sequence[Cut], of_the_loss: Sequence[Operations], eps: float
) -> tuple[Cut, ...]:
    """Those that the loss of the case does not make: in the same line, or of the same values."""
    meant = [cut for run in of_the_loss for cut in cuts_of(run)]
    lines = {cut.ended.line for cut in meant}
    known = KnownValues((cut.value for cut in meant if cut.value is not None), (), eps)
    return tuple(
        cut
        for cut in cuts
        if cut.ended.line not in lines and (cut.value is None or known.has(cut.value) != "yes")
    )


def only_of_ranks(ranks: Sequence[Operations], alone: Operations) -> tuple[Cut, ...]:
    """The cuts of ranks at lines at which one rank has none, each once."""
    there = {(cut.ended.line, cut.is_leaf) for cut in cuts_of(alone)}
    found = {(cut.ended.line, cut.is_leaf): cut for run in reversed(ranks) for cut in cuts_of(run)}
    return tuple(cut for key, cut in found.items() if key not in there)


def at_collectives(ranks: Sequence[Operations]) -> tuple[Cut, ...]:
    """The cuts of ranks at collectives of which autograd knows nothing, each line once."""
    every = [cut for run in reversed(ranks) for cut in cuts_of(run) if cut.ended.talks]
    return tuple({cut.ended.line: cut for cut in every}.values())


def called(operation: Operation) -> str:
    """The name under which a user knows this operation."""
    return NAMES.get(operation.name, operation.name.strip("_").removesuffix("_forward"))


def cut_text(cut: Cut) -> str:
    """Says what the line does, as a clause."""
    name = called(cut.ended)
    if cut.is_leaf:
        return "makes a new leaf, whose gradient goes on only where the step passes it on"
    if not cut.ended.recorded:
        return "computes where gradients are turned off"
    if cut.ended.talks:
        return f"{name} gives values of which autograd does not know where they are from"
    return f"{name}() gives a result without a gradient"


def lines_of_cuts(cuts: Sequence[Cut]) -> list[PointedLine]:
    """The lines at which gradients end."""
    lines: list[PointedLine] = []
    for cut in sorted(cuts, key=lambda one: one.is_leaf)[:MOST_CUTS]:
        if cut.ended.line is not None:
            lines.append(PointedLine(cut.ended.line, cut_text(cut), is_fault=True))
    return lines


# Gradients that do not depend on the loss: a backward method of the user's own drops what it is
# given.


def independent_of_the_loss(run: Operations) -> tuple[str, ...]:
    """The parameters whose gradients backward makes of nothing that comes from the gradient that it
    begins with, where that is not 1 all the way: a loss that is scaled gives the same gradients.
    """
    operations = run.operations
    seeds = {
        number - 1
        for number, one in enumerate(operations)
        if one.in_backward and number and operations[number - 1].name == "ones_like"
    }
    flows, backward, by_python = set(seeds), set[int](), set[float]()
    for number, one in enumerate(operations):
        if one.after & flows or by_python.intersection(one.numbers):
            flows.add(number)
        if number in flows and one.name == READ_BY_PYTHON and one.given[0] is not None:
            by_python.add(float(run.values[one.given[0]].tensor))
        if one.in_backward or one.after & backward:
            backward.add(number)
    if not any(_is_scaled(run, operations[number]) for number in flows):
        return ()
    return tuple(name for name, writer in run.results.items() if writer in backward - flows)


def _is_scaled(run: Operations, operation: Operation) -> bool:
    """True if an operation has left something else than ones."""
    held = [run.values[one].tensor for one in operation.returned if one is not None]
    return any(bool((one != 1).any()) for one in held)
