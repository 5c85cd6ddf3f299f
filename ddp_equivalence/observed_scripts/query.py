"""What a replay is asked to compute, and its answer. Both travel as JSON, gradients as a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.recorded_step import (
    as_tuples,
    digests_of_micro_batches,
    write_tensors,
)

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import StepInProgress

RowOrder = Literal["by row", "in blocks", "in dim 1", "no rows"]
"""How the rows of a batch follow one another in random numbers that are drawn for them. Where each
row has several entries, those of one row stand together, or else the first entries of all rows come
first, and then the second ones. ``in dim 1``: not in dim 0, which is the time in some models.
``no rows``: the numbers belong to no row, such as noise that is added to weights.
"""


def path_of_kept(folder: Path, steps: tuple[int, ...]) -> Path:
    """Where the process listens that is kept at the beginning of these steps."""
    return folder / f"kept{steps[0]}"


STATE = "state "
"""Before the digest of the state of a generator."""

KINDS = ("own", "before_clip", "held")
"""Of gradients. One that is not in a file has the values of the next that is."""


@dataclass(frozen=True)
class Piece:
    """Rows that one rank read in one micro-batch. ``rows``: which of them; None for all."""

    rank: int
    micro_batch: int
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class State:
    """Buffers with these names come from this file, and not from the record.

    ``next_step``: the step that the query after this one asks for; the optimizer leaves the weights
    that the ranks had there. ``reports_buffers``: the answer holds what the buffers were before
    those of the record replaced them: what one process has made of them since the query before.
    """

    file: str = ""
    names: tuple[str, ...] = ()
    next_step: int | None = None
    reports_buffers: bool = False

    @property
    def is_carried_over(self) -> bool:
        """The query belongs together with the one after it, or with the one before it."""
        return self.reports_buffers or self.next_step is not None

    def of(self, name: str) -> Tensor | None:
        """The value of a buffer; None for that of the record."""
        from safetensors import safe_open

        if name not in self.names:
            return None
        with safe_open(self.file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(f"left/{name}")
        return found


@dataclass(frozen=True)
class Query:
    """``steps``: the recorded steps to compute, more than one where several optimizers step one
    after the other on what was read once. ``micro_batches``: for each micro-batch, the pieces whose
    rows are joined. ``weights_of``: the rank whose weights and buffers are put in place. ``nudge``:
    the number of the pattern by which weights are moved one eps up or down; 0 for none.
    ``row_order``: that of random numbers. ``logged``: the name of a module; from its first call on,
    the operations of torch are logged. "" for none. ``is_epoch``: the script gets these
    micro-batches as an epoch of their own, because on the ranks they ended one, and may have been
    fewer than usual. ``state``: buffers that are not those of the record. ``keep``: keep a process
    at the beginning of the steps, to answer later questions about them.
    """

    number: int
    steps: tuple[int, ...]
    micro_batches: tuple[tuple[Piece, ...], ...]
    weights_of: int = 0
    nudge: int = 0
    row_order: RowOrder = "by row"
    logged: str = ""
    is_epoch: bool = False
    state: State = field(default_factory=State)
    keep: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose rows are in it, each once."""
        return tuple(dict.fromkeys(piece.rank for one in self.micro_batches for piece in one))

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Query:
        """What ``to_json`` wrote."""
        raw = as_tuples(json.loads(text))
        micro_batches = (tuple(Piece(**one) for one in pieces) for pieces in raw["micro_batches"])
        state = State(**raw["state"])
        return cls(**{**raw, "micro_batches": tuple(micro_batches), "state": state})


@dataclass(frozen=True)
class AnswerOfStep:
    """``number``: of the recorded step. ``file``: with the gradients: those before clipping below
    ``before_clip/``, and those that the optimizer was given below ``held/``. ``losses``: where
    each backward pass began. ``without_gradient``: parameters of the optimizer that had none.
    ``unnamed``: how many of its parameters are in no module that was called. ``counts``: the rows
    that each call of a trained module was given. ``read``: for each micro-batch, digests of the
    tensors of its first call. ``of_other_parameters``: the optimizer that stepped has none of the
    parameters of the one that stepped in the record, such as where two optimizers take turns.
    ``results``: the mark of what each call of a trained module returned.
    ``lowest``: the least precise dtype in which a value was rounded inside a script that computes
    in float64, if the query has a nudge; "" if none was.
    """

    number: int
    file: str
    losses: tuple[float, ...]
    without_gradient: tuple[str, ...]
    unnamed: int = 0
    counts: tuple[int, ...] = ()
    read: tuple[tuple[str, ...], ...] = ()
    of_other_parameters: bool = False
    lowest: str = ""
    results: tuple[float, ...] = ()
    in_python: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        seen: StepInProgress,
        number: int,
        file: Path,
        recorded: Collection[str],
        lowest: str = "",
    ) -> AnswerOfStep:
        """Write the gradients of a step that is complete. ``recorded``: the parameters that the
        optimizer had in the record.
        """
        before = seen.before_clip or {}  # without clipping, they are the same
        tensors = {f"held/{name}": g for name, g in seen.held.items() if g is not None}
        tensors |= {
            f"before_clip/{name}": g
            for name, g in before.items()
            if g is not None and name in seen.held
        }
        tensors |= {f"left/{name}": one for name, one in seen.left.items()}
        if _changed_by_hand(seen):
            tensors |= {f"own/{name}": g for name, g in seen.own.items() if name in seen.held}
        write_tensors(file, tensors)
        missing = tuple(name for name, g in seen.held.items() if g is None)
        counts = tuple(call.count for call in seen.calls)
        read = digests_of_micro_batches(seen.calls, seen.call_rows)
        others = bool(recorded) and bool(seen.held) and seen.held.keys().isdisjoint(recorded)
        losses = tuple(seen.losses)
        about_calls = (counts, read, others, lowest, tuple(seen.results), seen.in_python)
        return cls(number, str(file), losses, missing, seen.unnamed, *about_calls)

    def state_left(self) -> dict[str, Tensor]:
        """What the buffers held before those of the record replaced them, if that was asked."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as opened:
            keys = [key for key in opened.keys() if key.startswith("left/")]  # noqa: SIM118
            return {key.removeprefix("left/"): opened.get_tensor(key) for key in keys}

    def gradients(self, kind: str) -> dict[str, Tensor | None]:
        """The gradients by name; None for a parameter without one. ``kind``: as on the ranks."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as opened:
            kinds = {key.partition("/")[0] for key in opened.keys()}  # noqa: SIM118  (no dict)
            known = [one for one in KINDS[KINDS.index(kind) :] if one in kinds]
            prefix = f"{known[0] if known else 'held'}/"
            found: dict[str, Tensor | None] = {
                key.removeprefix(prefix): opened.get_tensor(key)
                for key in opened.keys()  # noqa: SIM118
                if key.startswith(prefix)
            }
        return dict.fromkeys(self.without_gradient) | found


def _changed_by_hand(seen: StepInProgress) -> bool:
    """True if the script changes what backward computed before it clips or steps."""
    left = seen.held if seen.before_clip is None else seen.before_clip
    pairs = [(seen.own.get(name), left.get(name)) for name in seen.held]
    if any(own is None and gradient is not None for own, gradient in pairs):
        return False  # it is not known of every parameter what backward computed
    return not all(
        gradient is not None and torch.equal(own, gradient.to(own.dtype))
        for own, gradient in pairs
        if own is not None
    )


@dataclass(frozen=True)
class Answer:
    """The answer to the query with this number. ``missed``: how often each random operation drew
    other numbers than the ranks, because it does not draw by rows. ``operations``: the file with
    those that were logged; "" if none were. ``alike``: the lines at which all ranks in the query
    drew the same random numbers for their rows.
    """

    number: int
    steps: tuple[AnswerOfStep, ...]
    missed: Mapping[str, int] = field(default_factory=dict)
    operations: str = ""
    alike: tuple[str, ...] = ()

    @property
    def of_other_parameters(self) -> bool:
        """It is another optimizer's turn."""
        return any(step.of_other_parameters for step in self.steps)

    @property
    def bytes(self) -> int:
        """How much the files hold."""
        return sum(Path(step.file).stat().st_size for step in self.steps)

    def delete(self) -> None:
        """Delete the files, which nobody needs."""
        for step in self.steps:
            Path(step.file).unlink(missing_ok=True)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Answer:
        """What ``to_json`` wrote."""
        steps = tuple(AnswerOfStep(**as_tuples(one)) for one in raw["steps"])
        missed, alike = raw["missed"], tuple(raw["alike"])
        return cls(raw["number"], steps, missed, raw["operations"], alike)
