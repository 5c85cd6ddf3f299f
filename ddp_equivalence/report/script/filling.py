"""What a case and a step put into the skeleton of a script."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import Shards, split
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.script.literals import NoSource, indices_literal
from ddp_equivalence.report.script.origin import origin_of
from ddp_equivalence.report.script.slicer import Slicer

SKELETON = "ddp_equivalence.report.script.skeleton"
PLACEHOLDERS = f"{SKELETON}.placeholders"

WIDE = ("task.case", "task.shards", "task.notes")
"""What few strategies ask for."""


def filled(request: Request) -> Slicer:
    """A slicer with all that a script of this check needs.

    Raises BadCase, with the field concerned, for what cannot be written as source.
    """
    filling = _Filling(request)
    for field in ("model", "batch", "loss", "step"):
        try:
            filling.functions[field]()
        except NoSource as error:
            raise _no_source(request, field, error) from error
    try:
        filling.slicer.main = filling.skeleton("main", "main")
    except NoSource as error:
        raise _no_source(request, "step", error) from error
    return filling.slicer


def _no_source(request: Request, field: str, error: Exception) -> BadCase:
    value = request.step if field == "step" else getattr(request.case, field)
    right = f"a function defined at the top level of a file; {error}"
    return BadCase(field, name_of(value), f"{right}, so no script can be written that has it")


class _Filling:
    """Answers the slicer's questions for the names that depend on the case."""

    def __init__(self, request: Request) -> None:
        self.request, self.case = request, request.case
        batches = build_batches(self.case, request.steps)
        self.examples = [count_examples(batch) for batch in batches]
        world_size = self.case.ranks.world_size
        self.deals = [split(self.case.shards, size, world_size) for size in self.examples]
        self.functions: dict[str, Callable[[], str]] = {
            "model": self._model,
            "batch": self._batch,
            "loss": self._loss,
            "step": self._step,
        }
        self.slicer = Slicer(redirects=self._redirects())

    def skeleton(self, module: str, name: str) -> str:
        origin = origin_of(importlib.import_module(f"{SKELETON}.{module}"))
        assert origin is not None
        return self.slicer.need(origin, name) or name

    def _redirects(self) -> dict[tuple[str, str], Callable[[], str]]:
        own: dict[str, Callable[[], str]] = {
            "build_model": self._model,
            "make_batch": self._batch,
            "loss": self._loss,
            "step": self._step,
        }
        own |= {name: self._constant(name) for name in self._constants()}
        start = "whole_numbers" if self.case.exact else "fresh"
        own |= {name: self._part(start, name) for name in ("model_at_start", "big_batches")}
        single, ranks = self._variants()
        own |= {
            "on_one_device": self._part(single, "on_one_device"),
            "on_this_rank": self._part(ranks, "on_this_rank"),
        }
        if not callable(self.case.model):
            model = MODELS[self.case.model]
            own["model_inputs"] = lambda: self.slicer.named(model.inputs, "model_inputs")
        if not callable(self.case.loss):
            loss = LOSSES[self.case.loss]
            own["loss_targets"] = lambda: self.slicer.named(loss.targets, "loss_targets")
            own["LOSS"] = self._parts_of_the_loss
        if self.request.strategy is not None:
            prepare = self.request.strategy.prepare
            own["prepare"] = lambda: self.slicer.named(prepare, "prepare")
        package = "ddp_equivalence"
        return {(PLACEHOLDERS, name): give for name, give in own.items()} | {
            (f"{package}.strategies.strategy", "Task"): self._part("strategy", "Task"),
            (f"{package}.case.build", "catalogue_loss_of"): self._part(
                "strategy", "catalogue_loss_of"
            ),
            (f"{package}.case.batch", "count_examples"): self._part("strategy", "count_examples"),
            (f"{package}.ranks.process_state", "keep_group"): self._part("strategy", "keep_group"),
            (f"{package}.case.losses", "LOSSES"): self._losses,
        }

    def _constants(self) -> dict[str, str]:
        case, request = self.case, self.request
        node_of = [row.node for row in case.ranks.rows]
        starts = [sum(self.examples[:step]) for step in range(len(self.examples))]
        batches = [
            f"range({start}, {start + size})"
            for start, size in zip(starts, self.examples, strict=True)
        ]
        whole = [Shards((tuple(range(size)),), size) for size in self.examples]
        one_process = request.strategy is not None and request.strategy.one_process
        nodes = [case.ranks.ranks_on(node) for node in range(case.ranks.nodes)]
        backend = {"gloo_fallback": None, "nccl": None, "emulated": "gloo"}
        lane = "gloo_cuda" if request.lane.name == "data_parallel" else request.lane.name
        last = split(case.shards, self.examples[0], case.ranks.world_size).indices[-1]
        catalogue = MODELS.get(case.model) if isinstance(case.model, str) else None
        return {
            "NODE_OF_RANK": "(0,)" if one_process else _tuple(node_of),
            "BACKEND": repr(backend.get(lane, lane)),
            "SEED": repr(case.seed),
            "DTYPE": str(case.dtype),
            "TOLERANCE": "0.0" if case.exact else "1.0",
            "LEARNING_RATE": repr(request.lr),
            "BIG_BATCHES": f"[{', '.join(batches)}]",
            "SHARDS": _deals(whole if one_process else self.deals),
            "DEALS": _deals(self.deals),
            "EXAMPLES": repr(sum(self.examples)),
            "OUTPUT_SIZE": repr(catalogue.output_size if catalogue else 0),
            "PADDED": repr(list(last)),
            "UNUSED_PARAMETERS": repr(bool(catalogue and catalogue.unused_on_some_ranks)),
            "RANKS_OF_NODE": repr(nodes),
            "LOSS_NAME": repr(case.loss if isinstance(case.loss, str) else None),
        }

    def _constant(self, name: str) -> Callable[[], str]:
        same = name == "DEALS" and self._constants()["DEALS"] == self._constants()["SHARDS"]
        return lambda: self.slicer.constant("SHARDS" if same else name, self._constants()[name])

    def _part(self, module: str, name: str) -> Callable[[], str]:
        return lambda: self.skeleton(module, name)

    def _variants(self) -> tuple[str, str]:
        if self.request.compare == "update":
            return "update_by_step", "update_by_step" if self.request.strategy else "update"
        both = "one_step" if len(self.examples) == 1 else "several_steps"
        return both, both

    def _model(self) -> str:
        model = self.case.model
        if isinstance(model, str):
            return self.slicer.named(MODELS[model].build, f"build_{model}")
        return self.slicer.named(model, "build_model")

    def _batch(self) -> str:
        if self.case.batch is None:
            padded = "make_padded_batch" if self.case.shards == "no_valid_token" else "make_batch"
            return self.skeleton("catalogue_batch", padded)
        return self.slicer.named(self.case.batch, "make_batch")

    def _loss(self) -> str:
        loss = self.case.loss
        if isinstance(loss, str):
            return self.slicer.named(LOSSES[loss].value, loss)
        return self.slicer.named(loss, "loss")

    def _step(self) -> str:
        if self.request.strategy is None:
            return self.slicer.named(self.request.step, "step")
        prepare = self.slicer.named(self.request.strategy.prepare, "prepare")
        text = "\n".join(
            one.origin.source.edited(one.span, []) for one in self.slicer.pieces.values()
        )
        wide = prepare and any(word in text for word in WIDE)
        return self.skeleton("strategy", "wide_step" if wide else "step")

    def _parts_of_the_loss(self) -> str:
        """The catalogue's loss with what strategies that divide by a global count ask it for."""
        loss = LOSSES[str(self.case.loss)]
        space = self.slicer.expression(importlib.import_module("types").SimpleNamespace)
        totals = self.slicer.named(loss.totals, "totals")
        normalisers = self.slicer.named(loss.normalisers, "normalisers")
        return self.slicer.glued("LOSS", f"{space}(totals={totals}, normalisers={normalisers})")

    def _losses(self) -> str:
        if callable(self.case.loss):
            return self.slicer.glued("LOSSES", "{}")
        return self.slicer.glued("LOSSES", f"{{{self.case.loss!r}: {self._parts_of_the_loss()}}}")


def _deals(deals: list[Shards]) -> str:
    rows = [f"[{', '.join(map(indices_literal, deal.indices))}]" for deal in deals]
    return f"[{', '.join(rows)}]  # of every rank, in every step"


def _tuple(values: list[int]) -> str:
    return f"({', '.join(map(str, values))}{',' * (len(values) == 1)})"
