"""A case: the model, batch and loss that are trained, and the examples that each rank gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case import layouts, shards
from ddp_equivalence.case.batch import BatchDims
from ddp_equivalence.case.errors import BadCase, of_type, one_of, whole_number
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS

# What stands in a case that has no loss, because its check has a reference of the user's own.


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    """Raise an error: nothing asks for the loss of such a case."""
    raise NotImplementedError("the case has no loss")


# A case: what is trained, on which layout, and which examples each rank gets.

ModelBuilder = Callable[[], nn.Module]
BatchBuilder = Callable[[torch.Generator], Any]
LossFunction = Callable[[nn.Module, Any], Tensor]

EXAMPLES_PER_RANK = 5
"""The examples per rank in a catalogue batch. The number is coprime to the catalogue's world sizes
and to its 3 micro-batches, so that a factor in a wrong gradient can have only one origin."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a loss, one big batch, and how its examples are split over ranks.

    ``str()`` is its test id.

    ``model``: () -> nn.Module, or a name in ``ddp_equivalence.case.models.MODELS``.
    ``batch``: (torch.Generator) -> pytree of tensors, examples along dim 0. With None, the
    catalogue makes the batch, and model and loss must be names of the catalogue.
    ``batch_dims``: where the examples lie, if not along dim 0 of every tensor: one dim for all
    tensors; or a dict from the path of a leaf, such as ``"['images']"``, to its dim, to 0 for a
    list with one entry per example, or to None for a leaf that every rank has whole; or a function
    (batch, indices) -> batch that takes these examples, together with ``examples``.
    ``loss``: (model, batch) -> scalar tensor, or a name in
    ``ddp_equivalence.case.losses.LOSSES``. Only a check with ``reference=`` needs none.
    ``layout``: ``"2x2"`` is 2 nodes with 2 ranks each, ``"1+3"`` is a node with 1 rank and a node
    with 3. With ``"-round-robin"`` after it, ranks are placed on the nodes in turn.
    ``shards``: ``"equal"``, ``"interleaved"``, ``"uneven"``, ``"one_example"``, ``"empty"``,
    ``"5+3"`` (examples per rank), or ``"own"``: every rank receives the whole batch.
    ``dtype``: the model and the floating-point leaves of the batch are cast to it. With None, they
    keep their own.
    ``seed``: is set before the model is built, so that all processes build the same. The batch has
    seeds of its own: 2^31 more before it is built, and 2^30 more for its generator.
    ``examples``: the number of examples in a catalogue batch (default: 5 per rank), or in one that
    a function deals.
    ``exact``: weights and batch are rounded to small integers, and gradients compared bit for bit.

    Raises BadCase for a field that cannot be right. The error says what would be accepted.
    """

    model: ModelBuilder | str
    loss: LossFunction | str = no_loss
    batch: BatchBuilder | None = None
    layout: str = "1x2"
    shards: str = "equal"
    dtype: torch.dtype | None = torch.float64
    seed: int = 0
    examples: int | None = None
    exact: bool = False
    batch_dims: BatchDims = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_name(self.model, "model", MODELS, instead_of_model(self.model))
        _check_name(self.loss, "loss", LOSSES, instead_of_loss(self.loss))
        world_size = self.ranks.world_size
        sizes = shards.explicit_sizes(self.shards, world_size)
        self._check_dtype()
        self._check_batch_dims()
        self._check_batch(sizes)
        seed = whole_number(self.seed)
        if seed is None or not 0 <= seed < 2**62:
            raise BadCase("seed", self.seed, "an integer from 0, below 2**62")
        object.__setattr__(self, "seed", seed)
        if not isinstance(self.exact, bool):
            raise BadCase("exact", self.exact, "True or False")
        if self.shards == "no_valid_token" and self.batch is not None:
            raise BadCase(
                "shards",
                self.shards,
                "such as 'equal': only batches of the catalogue are padded so",
            )

    def _check_dtype(self) -> None:
        if self.dtype is None:
            return
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            right = "a floating-point torch.dtype, as torch.float64, or None to keep the model's"
            raise BadCase("dtype", self.dtype, instead_of_dtype(self.dtype) or right)

    def _check_batch(self, sizes: tuple[int, ...] | None) -> None:
        if self.batch is None:
            if not (isinstance(self.model, str) and isinstance(self.loss, str)):
                right = "a function (torch.Generator) -> pytree of tensors, for your model or loss"
                raise BadCase("batch", None, right)
            model, loss = MODELS[self.model], LOSSES[self.loss]
            if model.output != loss.output:
                right = f"a loss for {model.output!r} output, which {self.model} returns"
                raise BadCase("loss", self.loss, f"{right}; this one is for {loss.output!r}")
        elif not callable(self.batch):
            raise BadCase("batch", of_type(self.batch), INSTEAD_OF_BATCH)
        if self.examples is None:
            return
        if self.batch is not None and not callable(self.batch_dims):
            raise BadCase("examples", self.examples, "left out: your batch function sets the size")
        examples = whole_number(self.examples)
        if examples is None or examples < 1:
            raise BadCase("examples", self.examples, "an integer from 1")
        if sizes is not None and sum(sizes) != examples:
            raise BadCase("examples", examples, f"the sum of the shards, {sum(sizes)}")
        object.__setattr__(self, "examples", examples)

    def _check_batch_dims(self) -> None:
        dims = self.batch_dims
        if dims is None:
            return
        if self.batch is None:
            raise BadCase("batch_dims", dims, "left out, since the catalogue makes the batch")
        if callable(dims):
            if self.examples is None:
                right = "the number of examples in the batch, since a function deals them"
                raise BadCase("examples", None, right)
            return
        by_path = dims if isinstance(dims, Mapping) else {"": dims}
        whole = isinstance(dims, Mapping)
        if not all(isinstance(key, str) and _is_dim(dim, whole) for key, dim in by_path.items()):
            right = "None, a dim from 0 of all tensors, a dict from the path of a leaf to its dim "
            right += "or None, or a function (batch, indices) -> batch"
            raise BadCase("batch_dims", dims, right)

    @property
    def ranks(self) -> Layout:
        """The table of ranks that the layout names."""
        return layouts.parse(self.layout)

    @property
    def is_catalogue(self) -> bool:
        """True if model, loss and batch come from the catalogue: their names describe the case."""
        return isinstance(self.model, str) and isinstance(self.loss, str) and self.batch is None

    @property
    def catalogue_examples(self) -> int:
        """The number of examples in one big batch of the catalogue."""
        sizes = shards.explicit_sizes(self.shards, self.ranks.world_size)
        return self.examples or (sum(sizes) if sizes else EXAMPLES_PER_RANK * self.ranks.world_size)

    @property
    def dtype_name(self) -> str:
        name = "as-built" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{name}-exact" if self.exact else name

    def __str__(self) -> str:
        parts = (name_of(self.model), name_of(self.loss), self.layout, self.shards)
        return "-".join((*parts, self.dtype_name, f"seed{self.seed}"))


def name_of(subject: object) -> str:
    """The name under which a model, loss or step appears in test ids and reports."""
    if isinstance(subject, str):
        return subject
    return str(getattr(subject, "__name__", type(subject).__name__)).strip("<>")


def _is_dim(value: object, or_none: bool) -> bool:
    if value is None:
        return or_none
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_name(value: object, field: str, names: dict[str, Any], instead: str) -> None:
    """Raises BadCase if the value is no name and no function; or says what to write ``instead``."""
    if instead:
        raise BadCase(field, name_of(value), instead)
    if value not in names if isinstance(value, str) else not callable(value):
        raise BadCase(field, value, f"a function, or {one_of(names, value)}")


# What a caller has probably meant by an argument of the wrong type, as an error says it.

INSTEAD_OF_BATCH = (
    "a function (torch.Generator) -> pytree of tensors, because every process makes its own: "
    "batch=lambda generator: ..."
)
"""The right form of a batch that is given as tensors."""


def instead_of_dtype(value: object) -> str:
    """The right form of a dtype that is given by its name, as in ``"float32"``; else ""."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    dtype = getattr(torch, name, None)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return f"{dtype}, without quotes" if is_float else ""


def instead_of_model(model: object) -> str:
    """The right form of a model that is a module and not a function that builds one; else ""."""
    if not isinstance(model, nn.Module):
        return ""
    return (
        "a function that builds the model, because every process builds its own: "
        f"model=lambda: {type(model).__name__}(...)"
    )


def instead_of_loss(loss: object) -> str:
    """The right form of a loss that is one of torch's, which take other arguments; else ""."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if not str(getattr(kind, "__module__", "")).startswith("torch.nn."):
        return ""
    name = str(getattr(kind, "__name__", "loss"))
    call = f"{name}()" if isinstance(kind, type) else name
    return (
        "a function (model, batch) -> scalar tensor, which calls the model itself: "
        f'loss=lambda model, batch: {call}(model(batch["inputs"]), batch["targets"])'
    )
