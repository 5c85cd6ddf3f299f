"""One optimizer step of one rank, as it is recorded: JSON beside a file of tensors, no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import digest
from ddp_equivalence.observed_scripts.rows import NO_ROWS, Rows, rows_with_tensors, with_rows_first

# Writes tensors to a file of the safetensors format, one after the other.
#
# The library's own ``save_file`` first copies all of them to memory, which a model that nearly
# fills the memory does not leave. The library reads what is written here.
#
# Source of the format: https://github.com/huggingface/safetensors#format

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""The names of dtypes in the format."""

ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write dense tensors of the CPU. Raises ValueError for a dtype that the format lacks."""
    header: dict[str, object] = {}
    begin = 0
    # As the library does: the largest elements first, so that all of them are aligned.
    items = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in items:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which cannot be written")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in items:
            if tensor.numel():
                flat = tensor.detach().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)


# Lines of the user's own code that did something with the model, its data or its optimizer.


@dataclass(frozen=True)
class Place:
    """A line of the user's code. ``file`` is empty where none is known."""

    file: str = ""
    number: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}" if self.file else ""


@dataclass(frozen=True)
class EarlierPlaces:
    """What the script did before a step: each is an empty place where no line was seen.

    ``optimizer``: made the optimizer that stepped. ``loader``: made the loader from which the step
    read first. ``cleared``: called zero_grad since the step before. ``loaded``: the name of a
    module -> the last line that loaded its weights. ``buffers``: the name of a buffer -> the line
    in the class of its module that assigns it, if there is only one; an empty place if not.
    ``scheduled``: stepped a scheduler of the optimizer last. ``state_loaded``: loaded the state of
    the optimizer. ``steps_with``: its options and state, see ``optimizer_states``.
    """

    optimizer: Place = field(default_factory=Place)
    loader: Place = field(default_factory=Place)
    cleared: Place = field(default_factory=Place)
    loaded: Mapping[str, Place] = field(default_factory=dict)
    buffers: Mapping[str, Place] = field(default_factory=dict)
    scheduled: Place = field(default_factory=Place)
    state_loaded: Place = field(default_factory=Place)
    steps_with: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EarlierPlaces:
        """What ``dataclasses.asdict`` made of it."""
        return cls(
            optimizer=Place(**raw["optimizer"]),
            loader=Place(**raw["loader"]),
            cleared=Place(**raw["cleared"]),
            loaded={name: Place(**place) for name, place in raw["loaded"].items()},
            buffers={name: Place(**place) for name, place in raw["buffers"].items()},
            scheduled=Place(**raw["scheduled"]),
            state_loaded=Place(**raw["state_loaded"]),
            steps_with=raw["steps_with"],
        )


@dataclass(frozen=True)
class Event:
    """``number``: how many events of this kind there were before, after so many backward passes.

    ``passes``: those of a whole step; a replay may make others than a rank.
    """

    kind: str
    passes: int = 0
    number: int = 0

    def name(self, passes: int) -> str:
        """Its name in the record, where a rank has made so many backward passes before it."""
        return f"generator/{self.kind}/{passes}/{self.number}"


@dataclass(frozen=True)
class SeenCall:
    """A call of an outermost module with gradients enabled, one that is trained.

    ``module``: its name in the record. ``backwards``: how many backward passes had run before.
    ``count``: the rows that it was called with. ``place``: the line that called it.
    """

    module: str
    backwards: int
    count: int
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class SeenClip:
    """A call of torch's clip_grad_norm_ or clip_grad_value_.

    ``scale``: the loss scale by which the gradients were still multiplied. ``changed``: the
    gradients were really made smaller.
    """

    limit: float
    norm: float
    scale: float
    changed: bool
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class Epoch:
    """Of a loader. ``batches``: how many it has in an epoch; 0 if that is not known.
    ``last_rows``: the rows of the last one, if they are fewer than those of the others, else 0.
    ``made``: the number of loaders that the script had made before this one; None if not known.
    """

    batches: int = 0
    last_rows: int = 0
    made: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """``number``: of the step, from 0. ``optimizers``: the classes of those that stepped.

    ``losses``: the value at which each backward pass began, without a loss scale. ``batches``: the
    (loader, number) of each batch that was read, in order, and ``batch_counts`` the rows of each.
    Loaders have numbers in the order in which they were first trained with; ``loaders``: for each,
    its number among all over which this process iterated, of which some are for evaluation.
    ``calls``, ``clips``: as they happened. ``scale``: the loss scale of the last backward pass.
    ``weights``: a digest of every weight and buffer at its module's first call. ``draws``: random
    numbers were drawn by the script. ``without_gradient``: the parameters of the optimizer that had
    none. ``unnamed``: the number of parameters of the optimizer that are in no module which was
    called. ``ahead``: how many batches the script had fetched and not used. ``stepped_at``: the
    line that called the optimizer, and ``backward_at`` those that called backward. ``autocast``:
    the dtypes of the autocast regions in which a module was called. ``planted``: how often a
    planted fault had fired until then; None if none was planted. ``batch_norm``: a trained module
    that was called normalises by the statistics of its batch. ``by_grad``: its backward passes
    were calls of ``torch.autograd.grad``. ``left_out``: the batches of the first loader, by their
    number in the step, with which it did not go backward. ``in_python``: see
    ``held_in_python``. ``read``: as in ``AnswerOfStep``.
    ``results``: the mark of what each call returned, see ``mark_of``.
    ``frozen``: the parameters of the optimizer that require no gradient, and the lines that have
    frozen them. ``earlier``: lines that ran before. ``epoch``: of the first loader.
    """

    number: int
    optimizers: tuple[str, ...]
    losses: tuple[float, ...]
    batches: tuple[tuple[int, int], ...]
    batch_counts: tuple[int, ...]
    calls: tuple[SeenCall, ...]
    clips: tuple[SeenClip, ...]
    scale: float
    weights: Mapping[str, str]
    draws: bool
    without_gradient: tuple[str, ...]
    unnamed: int
    ahead: int = 0
    stepped_at: Place = field(default_factory=Place)
    backward_at: tuple[Place, ...] = ()
    autocast: tuple[str, ...] = ()
    planted: int | None = None
    batch_norm: bool = False
    by_grad: bool = False
    left_out: tuple[int, ...] = ()
    in_python: Mapping[str, str] = field(default_factory=dict)
    loaders: tuple[int, ...] = ()
    read: tuple[tuple[str, ...], ...] = ()
    results: tuple[float, ...] = ()
    frozen: Mapping[str, Place] = field(default_factory=dict)
    earlier: EarlierPlaces = field(default_factory=EarlierPlaces)
    epoch: Epoch = field(default_factory=Epoch)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RecordedStep:
        """What ``to_json`` wrote."""
        raw: dict[str, Any] = as_tuples(json.loads(text))
        raw["calls"] = tuple(
            SeenCall(**{**call, "place": Place(**call["place"])}) for call in raw["calls"]
        )
        raw["clips"] = tuple(
            SeenClip(**{**clip, "place": Place(**clip["place"])}) for clip in raw["clips"]
        )
        raw["frozen"] = {name: Place(**place) for name, place in raw["frozen"].items()}
        raw["earlier"] = EarlierPlaces.from_json(raw["earlier"])
        raw["epoch"] = Epoch(**raw["epoch"])
        raw["stepped_at"] = Place(**raw["stepped_at"])
        raw["backward_at"] = tuple(Place(**place) for place in raw["backward_at"])
        return cls(**raw)


def as_tuples(value: Any) -> Any:
    """What ``json`` has read, with tuples in the place of its lists."""
    if isinstance(value, dict):
        return {name: as_tuples(one) for name, one in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def digests_of_micro_batches(
    calls: Sequence[SeenCall], rows: Sequence[Rows]
) -> tuple[tuple[str, ...], ...]:
    """For each micro-batch, digests of the tensors with rows that its first call was given.

    What later calls are given may depend on what is computed.
    """
    first: dict[int, Rows] = {}
    for call, given in zip(calls, rows, strict=True):
        first.setdefault(call.backwards, given)
    return tuple(
        tuple(digest({path: tensor}) for path, tensor in one.tensors_with_rows())
        for _, one in sorted(first.items())
    )


def rank_folder(folder: str | Path, rank: int) -> Path:
    """Where one rank's record lies."""
    return Path(folder) / f"rank{rank}"


def write_step(
    folder: Path, step: RecordedStep, tensors: Mapping[str, Tensor], lists: Mapping[str, Any]
) -> None:
    """Write a step. The JSON file is written last, so that where it lies the step is complete."""
    write_tensors(tensor_file(folder, step), tensors)
    (folder / f"step{step.number}.lists.json").write_text(json.dumps(lists))
    write_whole(folder / f"step{step.number}.json", step.to_json())


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it meanwhile finds all of it, or nothing."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(path)


def tensor_file(folder: Path, step: RecordedStep) -> Path:
    """The file with the tensors of a step."""
    return folder / f"step{step.number}.safetensors"


class StepReader:
    """Reads what one rank recorded of one step; tensors are read when they are asked for.

    ``time_first``: batches have their rows in dim 1.
    """

    def __init__(self, folder: Path, number: int, time_first: bool = False) -> None:
        self._time_first = time_first
        self.step = RecordedStep.from_json((folder / f"step{number}.json").read_text())
        self._lists = json.loads((folder / f"step{number}.lists.json").read_text())
        self._file = _opened(tensor_file(folder, self.step))
        self._keys = frozenset[str](self._file.keys())

    def tensor(self, name: str) -> Tensor | None:
        """One tensor; None if it was not recorded."""
        found: Tensor | None = self._file.get_tensor(name) if name in self._keys else None
        return found

    def below(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin with this, by the rest of their names."""
        return {
            key.removeprefix(prefix): self._file.get_tensor(key)
            for key in sorted(self._keys)
            if key.startswith(prefix)
        }

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors whose names begin with this, by the rest of their names."""
        return {
            key.removeprefix(prefix): tuple(self._file.get_slice(key).get_shape())
            for key in sorted(self._keys)
            if key.startswith(prefix)
        }

    def shapes_of_whole(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The same, without the tensors in the entries of lists."""
        listed = tuple(
            f"{place}{path}["
            for place, known in self._lists.items()
            if place.startswith(prefix)
            for path in known["entries"]
        )
        shapes = self.shapes(prefix)
        return {
            name: shape
            for name, shape in shapes.items()
            if not f"{prefix}{name}".startswith(listed)
        }

    def rows(self, prefix: str) -> Rows:
        """The rows that were recorded under this prefix."""
        rows = rows_with_tensors(self._lists.get(prefix, NO_ROWS), self.below(prefix))
        return with_rows_first(rows) if self._time_first else rows

    @cached_property
    def batch_counts(self) -> tuple[int, ...]:
        """The number of rows of each batch."""
        if not self._time_first:
            return self.step.batch_counts
        places = range(len(self.step.batch_counts))
        return tuple(self.rows(f"batch/{place}/").count for place in places)

    @cached_property
    def call_counts(self) -> tuple[int, ...]:
        """The number of rows with which each module was called."""
        if not self._time_first:
            return tuple(call.count for call in self.step.calls)
        return tuple(self.rows(f"call/{place}/").count for place in range(len(self.step.calls)))

    def gradient_names(self, kind: str) -> tuple[str, ...]:
        """The names below ``kind``, which is "held/", "before_clip/" or "own/"."""
        return tuple(sorted(k.removeprefix(kind) for k in self._keys if k.startswith(kind)))


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor, in float64 if it has floats of less."""
    lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.double() if lower else tensor


def loaders_of_training(folder: str) -> tuple[int, ...]:
    """The loaders that the ranks trained with in all recorded steps, by their numbers on rank 0."""
    known: tuple[int, ...] = ()
    number = 0
    while True:
        try:
            known = StepReader(rank_folder(folder, 0), number).step.loaders
        except FileNotFoundError:
            return known
        number += 1
