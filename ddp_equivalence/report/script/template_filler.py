"""Fill the placeholders of the template with a case and a step."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.case import losses
from ddp_equivalence.case.batch import BatchDims, concatenate, count_examples, move, take
from ddp_equivalence.case.batch_tree import map_tensors, tensors_of
from ddp_equivalence.case.build import SubsetBuilder, build_whole_batch, catalogue_loss_of
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.process_state import keep_group
from ddp_equivalence.report.script.render import case_constants
from ddp_equivalence.report.script.slicing.contents import (
    TEMPLATE,
    Contents,
    NoSource,
    source_module,
)
from ddp_equivalence.report.script.slicing.slicer import Replacement, Slicer
from ddp_equivalence.strategies.strategy import Task

CASE_ATTRIBUTES = ("task.case", "task.shards", "task.notes")
"""The script of a strategy that uses one of these contains ``TaskWithCase``. Most strategies only
need the model, the rank and the loss, which ``Task`` has."""


def fill_template(request: Request) -> Contents:
    """Everything that a script of this check contains.

    Raises BadCase, which names the field, if a function cannot be written as source.
    """
    filler = _TemplateFiller(request)
    for field, bring_in in filler.functions.items():
        try:
            bring_in()
        except NoSource as error:
            raise _bad_field(request, field, error) from error
    try:
        filler.slicer.contents.main = filler.from_template("main", "main")
    except NoSource as error:
        raise _bad_field(request, "step", error) from error
    return filler.slicer.contents


def _bad_field(request: Request, field: str, error: Exception) -> BadCase:
    value = request.step if field == "step" else getattr(request.case, field)
    right = f"a function defined at the top level of a file; {error}"
    return BadCase(field, name_of(value), f"{right}, so no script can contain it")


def is_plain(batch: Any, dims: BatchDims) -> bool:
    """True if the few lines of ``template/plain_batch.py`` can take the batch apart."""
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        dims is None
        and len(tensors) == len(tensors_of(batch))
        and all(leaf.layout is torch.strided for leaf in tensors)
        and not any(leaf.is_complex() or leaf.requires_grad for leaf in tensors)
    )


class _TemplateFiller:
    """Maps every name that depends on the case to a function that brings it into the script.

    ``functions`` has the same for the fields that hold functions: model, batch, loss and step.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.case = request, request.case
        whole, sizes = build_whole_batch(self.case, request.steps)
        self.constants = case_constants(request, sizes)
        self.is_plain = is_plain(whole, self.case.batch_dims)
        self.functions: dict[str, Replacement] = {
            "model": self._model,
            "batch": self._batch,
            "batch_dims": self._batch_dims,
            "loss": self._loss,
            "step": self._step,
        }
        placeholders = f"{TEMPLATE}.placeholders"
        self.slicer = Slicer(
            self._package_replacements()
            | {(placeholders, name): bring_in for name, bring_in in self._placeholders().items()}
        )

    def from_template(self, module: str, name: str) -> str:
        """Bring a definition of the template into the script; return its name there."""
        source = source_module(importlib.import_module(f"{TEMPLATE}.{module}"))
        assert source is not None
        return self.slicer.definition(source, name) or name

    def _placeholders(self) -> dict[str, Replacement]:
        start = "start_from_integers" if self.case.exact else "start_from_seed"
        one_device, ranks = self._running_modules()
        placeholders: dict[str, Replacement] = {
            **{name: self._constant(name) for name in self.constants},
            "build_model": self._model,
            "make_batch": self._batch,
            "BATCH_DIMS": self._batch_dims,
            "take_examples": self._part(*self._taking()),
            "loss": self._loss,
            "step": self._step,
            "users_step": lambda: self.slicer.named(self.request.step, "step"),
            "model_at_start": self._part(start, "model_at_start"),
            "big_batches": self._part(start, "big_batches"),
            "on_one_device": self._part(one_device, "on_one_device"),
            "on_this_rank": self._part(ranks, "on_this_rank"),
        }
        if isinstance(self.case.model, str):
            inputs = MODELS[self.case.model].inputs
            placeholders["model_inputs"] = lambda: self.slicer.named(inputs, "model_inputs")
        if isinstance(self.case.loss, str):
            targets = LOSSES[self.case.loss].targets
            placeholders["loss_targets"] = lambda: self.slicer.named(targets, "loss_targets")
            placeholders["LOSS"] = self._parts_of_the_loss
        if self.request.strategy is not None:
            prepare = self.request.strategy.prepare
            placeholders["prepare"] = lambda: self.slicer.named(prepare, "prepare")
        return placeholders

    def _package_replacements(self) -> dict[tuple[str, str], Replacement]:
        """Definitions that strategies use, and that a script contains in a shorter form."""
        shorter_forms: tuple[Any, ...] = (Task, catalogue_loss_of, keep_group)
        if self.is_plain:
            shorter_forms += (count_examples,)
        replacements = {
            (form.__module__, form.__name__): self._part("catalogue_step", form.__name__)
            for form in shorter_forms
        }
        if self.is_plain:
            for form in (take, move, map_tensors, concatenate):
                place = form.__module__, form.__name__
                replacements[place] = self._part("plain_batch", form.__name__)
        else:
            place = f"{TEMPLATE}.start_from_seed", "in_dtype"
            replacements[place] = self._part("dealt_batch", "in_dtype")
        return {**replacements, (losses.__name__, "LOSSES"): self._losses}

    def _taking(self) -> tuple[str, str]:
        """The template's module and function that take some examples of the batch."""
        return ("plain_batch", "take") if self.is_plain else ("dealt_batch", "take_examples")

    def _batch_dims(self) -> str:
        dims = self.case.batch_dims
        if callable(dims):
            return self.slicer.named(dims, "deal")
        return self.slicer.constant("BATCH_DIMS", repr(dims)) if not self.is_plain else ""

    def _constant(self, name: str) -> Replacement:
        shards_twice = self.constants["CASE_SHARDS"] == self.constants["SHARDS"]
        used = "SHARDS" if name == "CASE_SHARDS" and shards_twice else name
        return lambda: self.slicer.constant(used, self.constants[name])

    def _part(self, module: str, name: str) -> Replacement:
        return lambda: self.from_template(module, name)

    def _running_modules(self) -> tuple[str, str]:
        """The template's modules that train on one device and on the ranks."""
        if self.request.compare == "update":
            own_trainer = self.request.strategy is None
            return "update_by_step", "update_by_trainer" if own_trainer else "update_by_step"
        steps = "one_step" if self.request.step_count == 1 else "several_steps"
        return steps, steps

    def _model(self) -> str:
        model = self.case.model
        if isinstance(model, str):
            return self.slicer.named(MODELS[model].build, f"build_{model}")
        return self.slicer.named(model, "build_model")

    def _batch(self) -> str:
        if self.case.batch is None:
            padded = self.case.shards == "no_valid_token"
            name = "make_padded_batch" if padded else "make_batch"
            return self.from_template("catalogue_batch", name)
        builder = self.case.batch
        if isinstance(builder, SubsetBuilder):
            builder = builder.builder  # the constant BIG_BATCHES has the positions
        return self.slicer.named(builder, "make_batch")

    def _loss(self) -> str:
        loss = self.case.loss
        if isinstance(loss, str):
            return self.slicer.named(LOSSES[loss].value, loss)
        return self.slicer.named(loss, "loss")

    def _step(self) -> str:
        if self.request.strategy is None:
            update = self.request.compare == "update"
            name = "weights_after_step" if update else "gradients_of_step"
            return self.from_template("own_names", name)
        self.slicer.named(self.request.strategy.prepare, "prepare")
        fragments = self.slicer.contents.fragments.values()
        text = "\n".join(each.module.source.edited(each.span, []) for each in fragments)
        uses_case = any(attribute in text for attribute in CASE_ATTRIBUTES)
        return self.from_template("catalogue_step", "step_with_case" if uses_case else "step")

    def _parts_of_the_loss(self) -> str:
        """The catalogue's loss in parts, for strategies that divide by a global count."""
        loss = LOSSES[str(self.case.loss)]
        namespace = self.slicer.expression(SimpleNamespace)
        totals = self.slicer.named(loss.totals, "totals")
        normalisers = self.slicer.named(loss.normalisers, "normalisers")
        parts = f"totals={totals}, normalisers={normalisers}"
        return self.slicer.assignment("LOSS", f"{namespace}({parts})")

    def _losses(self) -> str:
        if callable(self.case.loss):
            return self.slicer.assignment("LOSSES", "{}")
        entry = f"{self.case.loss!r}: {self._parts_of_the_loss()}"
        return self.slicer.assignment("LOSSES", f"{{{entry}}}")
