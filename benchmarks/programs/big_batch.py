"""The big batch of a program, in one process and without this package."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.programs.program import Program

Gradients = list[dict[str, Tensor | None]]
"""For each step the gradients by name; or one entry with the update of all steps together."""


def big_batch(program: Program, dtype: torch.dtype | None) -> Gradients:
    """What the big batch gives in one process in this precision; None keeps the model's own."""
    model = build(program).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, clip = program.options.get("optimizer"), program.options.get("clip")
    made: Any = optimizer(list(model.parameters())) if optimizer else []
    steppers = made if isinstance(made, list) else [made]
    found: Gradients = []
    for batch in batches_of(program):
        model.zero_grad(set_to_none=True)
        set_seeds(1 + len(found))
        cast = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch
        )
        program.case.loss(model, cast).backward()  # type: ignore[operator]
        found.append({n: p.grad for n, p in model.named_parameters()})
        if callable(clip):
            clip(list(model.parameters()))
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in steppers:
            one.step()
        if not steppers:
            plain_sgd_step(model, program)
    if program.options.get("compare") == "update":
        return [{n: p.detach() - before[n] for n, p in model.named_parameters()}]
    return found


def build(program: Program) -> nn.Module:
    """The model of a program, in its precision."""
    set_seeds(program.case.seed)
    model: nn.Module = program.case.model()  # type: ignore[operator]
    return model if program.case.dtype is None else model.to(program.case.dtype)


def batches_of(program: Program) -> list[Any]:
    """The big batch of every step, in the program's precision."""
    dtype, steps = program.case.dtype, program.options.get("steps", 1)
    assert isinstance(steps, int)
    assert program.case.batch is not None
    set_seeds(program.case.seed + 2**31)  # docs/batches.md says which seeds are whose
    batch = program.case.batch(torch.Generator().manual_seed(program.case.seed + 2**30))

    def cut(step: int) -> Any:
        def of_leaf(leaf: Tensor) -> Tensor:
            mine = leaf.chunk(steps)[step].clone()
            return mine.to(dtype) if dtype and mine.is_floating_point() else mine

        return pytree.tree_map_only(Tensor, of_leaf, batch)

    return [cut(step) for step in range(steps)]


def plain_sgd_step(model: nn.Module, program: Program) -> None:
    """A step of plain SGD, with the learning rate of the program."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= program.options.get("lr", 0.1) * parameter.grad.to_dense()


def set_seeds(seed: int) -> None:
    """Seed all generators that a program may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
