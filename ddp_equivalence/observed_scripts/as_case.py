"""An observed step as a case, whose loss asks the script itself, and the sums of its gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.comparison.gradients import digest
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.observed_scripts.oracle import CannotReplay, Oracle
from ddp_equivalence.observed_scripts.query import State
from ddp_equivalence.observed_scripts.record import Record, Row
from ddp_equivalence.observed_scripts.recorded_step import BEFORE_CLIP, OWN, GradientKind, Step
from ddp_equivalence.observed_scripts.rows import Part, joined

# An observed step as a case: its examples are the rows that the ranks read, and its loss asks the
# script itself for the gradient of any of them.
#
# So the comparison and the diagnosis of ``check`` need to know nothing of scripts.

MOST_LABELS = 1 << 20
"""Tensors with more elements than this are not looked at as labels."""

ROWS = "rows of the step"
"""The leaf of the batch: the numbers of the rows in an observed step. No label has spaces in its
name.
"""


@dataclass(frozen=True)
class ObservedStep:
    """One step of a script. ``number``: of the step. ``group``: the steps that are computed
    together, see ``Record.groups``. ``rows``: all rows that the ranks read, in their order.
    ``before``: the step before the group; None if it is not known. ``state``: as in ``Query``.
    """

    record: Record
    oracle: Oracle | None
    number: int
    group: tuple[int, ...]
    rows: tuple[Row, ...]
    before: ObservedStep | None = None
    state: State = field(default_factory=State)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.record.world_size)

    def of_rank(self, rank: int) -> Step:
        """What a rank did in the step."""
        return self.record.step(rank, self.number)

    @property
    def elements(self) -> int:
        """The number of elements of the weights and buffers."""
        return sum(one.numel() for one in self.of_rank(0).states.values())

    def answer(self, rows: Sequence[int], nudge: int = 0) -> Step:
        """What the script computes from these rows alone. ``nudge``: as in ``Query``.

        Raises CannotReplay.
        """
        if self.oracle is None:
            raise CannotReplay("the script does not run any more")
        answer = self.oracle.answer(self.group, [self.rows[row] for row in rows], nudge, self.state)
        return answer.steps[self.group.index(self.number)]

    def computed_alone(self, rows: Sequence[int]) -> dict[str, Tensor | None]:
        """What backward computes from these rows in one process, as ``gradients`` with ``OWN`` on a
        rank. Raises CannotReplay.
        """
        return self.by_short_name(self.answer(rows).computed)

    def by_short_name(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The gradients, by the names that reports use."""
        return {self.short(name): gradient for name, gradient in gradients.items()}

    @property
    def everything(self) -> tuple[int, ...]:
        """The numbers of all rows."""
        return tuple(range(len(self.rows)))

    @property
    def rows_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the rows that each rank read."""
        return tuple(
            tuple(number for number, row in enumerate(self.rows) if row.rank == rank)
            for rank in self.ranks
        )

    def short(self, name: str) -> str:
        """A parameter's name without that of its module, if only one module is trained."""
        modules = {one.partition(":")[0] for one in self.of_rank(0).stepped}
        return name.partition(":")[2] if len(modules) == 1 else name.replace(":", ".")

    def gradients(self, rank: int, kind: GradientKind) -> dict[str, Tensor | None]:
        """The gradients of a rank, of the parameters that its optimizer has."""
        return self.by_short_name(self.of_rank(rank).gradients(kind))

    def digests_of_rows(self, rank: int) -> dict[str, str]:
        """A digest of everything that a rank read in the group of steps, by where it was read."""
        found = {}
        for number in self.group:
            for place, rows in enumerate(self.record.step(rank, number).read_rows):
                for path, tensor in rows.all_tensors():
                    found[f"{number}/{place}/{path}"] = digest({path: tensor})
        return found

    def labels(self) -> dict[str, Tensor]:
        """The whole numbers and truth values that the ranks read with their rows, such as labels
        and masks: a loss may divide by their count. ``[rows, ...]``, padded where ranks differ.
        """
        parts: list[Part] = [
            (replace(rows, tensors=_whole_numbers(rows.tensors), entries={}), None)
            for rank in self.ranks
            for rows in self.record.read(rank, self.group)
        ]
        try:
            together = joined(parts)
        except ValueError:
            return {}
        return {
            re.sub(r"[^\w]+", ".", path).strip(".") or "inputs": tensor
            for path, tensor in together.tensors.items()
            if together.has_rows(path)
            and len(tensor) == len(self.rows)
            and tensor.numel() <= MOST_LABELS
        }

    def weights(self) -> dict[str, Tensor]:
        """The weights of the parameters that are compared, at the beginning of the step."""
        names = self.of_rank(0).held
        found: dict[str, Tensor] = {}
        for number in self.group:  # a module may have been called before an earlier step of these
            weights = self.record.step(0, number).states
            if number <= self.number:
                found |= {name: weights[name] for name in names if name in weights}
        return {self.short(name): found[name] for name in names if name in found}


def _whole_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        path: tensor
        for path, tensor in tensors.items()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }


def as_case(step: ObservedStep, kind: GradientKind, layout: str) -> Case:
    """The case of a step. ``kind``: which gradients its loss leaves. Weights keep their dtypes."""
    weights = step.weights()
    order = tuple(weights)

    def build() -> nn.Module:
        model = _model(weights)
        if step.of_rank(0).batch_norm:  # a hypothesis asks whether there is one
            norm = nn.BatchNorm1d(1, affine=False, track_running_stats=False)
            model.add_module("batch norm of the script", norm)
        return model

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {**step.labels(), ROWS: torch.arange(len(step.rows))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        rows = tuple(batch[ROWS].tolist())
        if not rows:
            raise ValueError("the script is given at least one row")
        try:
            answer = step.answer(rows)
        except CannotReplay as error:
            raise ValueError(str(error)) from error
        parameters = dict(model.named_parameters())
        found = step.by_short_name(answer.gradients(kind))
        value = sum(answer.losses)
        gradients = [found.get(name) for name in order]
        result: Tensor = _Known.apply(value, gradients, *(parameters[name] for name in order))  # type: ignore[no-untyped-call]
        return result

    loss.__name__ = "loss_of_the_script"
    return Case(model=build, batch=batch, loss=loss, layout=layout, shards="own", dtype=None)


class _Known(torch.autograd.Function):
    """A loss whose value and gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, value: float, gradients: Sequence[Tensor | None], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return parameters[0].new_tensor(value)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.to(dtype) * factor.to(dtype)
                for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
            ),
        )


def _model(weights: Mapping[str, Tensor]) -> nn.Module:
    """A module with these parameters, under their names."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            inside = module._modules[part]
            assert inside is not None
            module = inside
        module.register_parameter(last, nn.Parameter(weight.clone()))
    return root


# How far gradients are from weighted sums of others, over all parameters.

ROUNDING_IN_LOW_PRECISION = 1e-3
"""What may be off below float64, relative to the norm: thousands of eps of float32. Gradients in
bfloat16 and float16 round more than this, so that nothing is said of them.
"""

Gradients = Mapping[str, Tensor | None]


def rounding_of(gradients: Gradients) -> float:
    """What may be off where gradients of this precision are compared, relative to the norm."""
    dtypes = {gradient.dtype for gradient in gradients.values() if gradient is not None}
    return NEGLIGIBLE if dtypes <= {torch.float64} else ROUNDING_IN_LOW_PRECISION


def distance(terms: Sequence[tuple[float, Gradients]]) -> float:
    """The norm of the weighted sum, relative to that of the first term."""
    square = norm = 0.0
    for name in dict.fromkeys(name for _, gradients in terms for name in gradients):
        weighted = [
            weight * one.double() for weight, of in terms if (one := of.get(name)) is not None
        ]
        if weighted:
            square += float(torch.stack(weighted).sum(0).square().sum())
        first = terms[0][1].get(name)
        norm += 0.0 if first is None else float(first.double().square().sum())
    return float((square / norm) ** 0.5) if norm else float(square > 0)


def left_over(together: Gradients, parts: Sequence[Gradients]) -> float:
    """What no mixture of the parts explains, relative to the norm of the whole; 1 if that is zero,
    which shows nothing.
    """
    all_of_them = [together, *parts]
    products = torch.zeros(len(all_of_them), len(all_of_them), dtype=torch.float64)
    for name in dict.fromkeys(name for one in all_of_them for name in one):
        gradients = [one.get(name) for one in all_of_them]
        shape = next((one.shape for one in gradients if one is not None), None)
        if shape is None:
            continue
        rows = torch.stack(
            [
                torch.zeros(shape, dtype=torch.float64) if one is None else one.double()
                for one in gradients
            ]
        ).reshape(len(gradients), -1)
        products += rows @ rows.T
    of_parts, with_whole = products[1:, 1:], products[1:, 0]
    weights = torch.linalg.lstsq(of_parts, with_whole.unsqueeze(1)).solution.squeeze(1)
    left = products[0, 0] - 2 * weights @ with_whole + weights @ of_parts @ weights
    return float((left.clamp(min=0) / products[0, 0]).sqrt()) if products[0, 0] > 0 else 1.0


def holds_the_mean_of_own(step: ObservedStep, more: GradientKind | None = None) -> bool:
    """True if every rank holds the mean of what the ranks computed. ``more``: a kind of gradients
    that is added to each rank's own.
    """
    kinds = (OWN, more) if more else (OWN,)
    computed = [step.gradients(rank, kind) for rank in step.ranks for kind in kinds]
    terms = [(-1.0 / len(step.ranks), one) for one in computed]
    held = [step.gradients(rank, BEFORE_CLIP) for rank in step.ranks]
    return all(distance([(1.0, one), *terms]) <= rounding_of(one) for one in held)
