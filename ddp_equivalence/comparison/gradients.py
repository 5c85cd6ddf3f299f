"""Gradients by parameter name, samples of their elements, and digests of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import hidden_tensors, leaves_of
from ddp_equivalence.case.build import given_to
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.case.training import GradientKey

# Gradients by parameter name, and the few operations on them that a comparison needs.

Gradients = Mapping[GradientKey, Tensor | None]
"""(step, parameter name) -> gradient, or None where backward left none."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Description:
    """Shape, dtype and layout of a gradient; ``layout`` is ``strided`` or ``sparse_coo``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "strided"

    def __str__(self) -> str:
        layout = "" if self.layout == "strided" else f", {self.layout}"
        return f"{self.shape} {self.dtype_name}{layout}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_sparse(self) -> bool:
        return self.layout != "strided"


def in_first_step(by_name: Mapping[str, Tensor | None]) -> dict[GradientKey, Tensor | None]:
    """The updates by step and name: they are those of all steps, and count as the first step."""
    return {(0, name): tensor for name, tensor in by_name.items()}


def weights_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def sgd_step(model: nn.Module, lr: float) -> None:
    """SGD without momentum or weight decay, so that no wrong factor on the gradient is hidden."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)


def gathered(tensor: Tensor) -> Tensor:
    """The tensor; if it is sharded over ranks, as FSDP2 leaves gradients, all of it on each rank.

    All ranks must call this for the same tensors in the same order, since they gather the shards.
    """
    gather = getattr(tensor, "full_tensor", None)  # of DTensor, which takes half a second to import
    return tensor if gather is None else gather()


def dense(gradient: Tensor) -> Tensor:
    """The gradient without its graph, and dense if it was sparse; of a sharded one, this rank's
    shard.
    """
    gradient = getattr(gradient, "to_local", lambda: gradient)().detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def describe(gradients: Mapping[Key, Tensor | None]) -> dict[Key, Description | None]:
    """The description of every gradient; None for a gradient that is None."""
    return {
        key: None
        if gradient is None
        else Description(
            tuple(gradient.shape), gradient.dtype, str(gradient.layout).removeprefix("torch.")
        )
        for key, gradient in gradients.items()
    }


# Large gradients are sampled: only some of their elements are used to explain a difference.


@dataclass(frozen=True)
class ElementSample(Generic[Key]):
    """Which elements of flattened gradients are kept: every ``stride``-th, beginning at the first.

    Gradients are added element by element, so a sample also shows which gradients were added.
    ``sizes``: the number of elements of each gradient. ``stride``: the distance from each kept
    element to the next.
    """

    sizes: Mapping[Key, int]
    stride: Mapping[Key, int]

    @classmethod
    def at_most(cls, elements: int, sizes: Mapping[Key, int]) -> ElementSample[Key]:
        """Keep all elements if they are few enough, else about equally many of each gradient."""
        if sum(sizes.values()) <= elements:
            return cls(sizes, dict.fromkeys(sizes, 1))
        each = max(1, elements // len(sizes))
        # An odd stride visits the columns of a matrix in turn. An even one could skip some columns.
        return cls(sizes, {key: -(-size // each) | 1 for key, size in sizes.items()})

    @property
    def is_whole(self) -> bool:
        """True if every element is kept."""
        return all(stride == 1 for stride in self.stride.values())

    def size(self, key: Key) -> int:
        """How many elements of this gradient are kept."""
        return len(range(0, self.sizes[key], self.stride[key]))

    def of_chunk(self, key: Key, offset: int, values: Tensor) -> Tensor:
        """A copy of the kept elements among ``values``, which begin at ``offset``."""
        stride = self.stride[key]
        return (values if stride == 1 else values[-offset % stride :: stride]).clone()

    def of_one(self, key: Key, gradient: Tensor) -> Tensor:
        """A copy of the kept elements of one gradient, as float64 on the CPU."""
        flat = dense(gradient).reshape(-1)[:: self.stride[key]]
        return flat.to("cpu", torch.float64, copy=True)

    def of(self, gradients: Mapping[Key, Tensor | None]) -> Tensor:
        """The kept elements of all gradients as one vector; None counts as zeros."""
        return self.joined(
            {key: self.of_one(key, one) for key, one in gradients.items() if one is not None}
        )

    def joined(self, kept: Mapping[Key, Tensor]) -> Tensor:
        """One float64 vector of the elements kept of each gradient; zeros for a missing one."""
        return torch.cat(
            [
                kept[key].double()
                if key in kept
                else torch.zeros(self.size(key), dtype=torch.float64)
                for key in self.sizes
            ]
        )


# A hash of tensors. Two hashes are equal only if the tensors are the same, bit for bit.

BLOCK = 1024
"""How many words of 32 bits are condensed into one word of 64 bits."""

CONDENSED_FROM = 2**16
"""Tensors of this many bytes or more are condensed before they are hashed, which is faster."""


@cache
def _multipliers() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(np.random.SeedSequence(0).generate_state(BLOCK, np.uint64), np.uint64)


def bytes_of(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a flat, contiguous tensor on the CPU, in the memory that it has.

    ``Tensor.numpy`` would make that memory impossible to resize from then on, and FSDP resizes the
    memory of the weights.
    """
    if tensor.numel() <= 1:  # it counts as contiguous whatever its stride is
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    data: Any = np.from_dlpack(tensor.view(torch.uint8))
    return cast(np.ndarray[tuple[int], np.dtype[np.uint8]], data)


def hash_bytes(hashed: hashlib._Hash, tensor: Tensor) -> None:
    """Add the bytes of a flat, contiguous tensor on the CPU to a hash.

    A large tensor is condensed first, by multilinear hashing (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014). That is four times faster than SHA-256, and different tensors
    get the same hash only with a probability of 2^-32.
    """
    data = bytes_of(tensor)
    if data.size >= CONDENSED_FROM:
        whole = data.size - data.size % (4 * BLOCK)
        words = data[:whole].view(np.uint32).reshape(-1, BLOCK)
        hashed.update(
            np.einsum("ij,j->i", words, _multipliers(), dtype=np.uint64, casting="unsafe").data
        )
        data = data[whole:]
    hashed.update(data.data)


def digest(tensors: Mapping[str, Tensor | None] | Iterator[tuple[str, Tensor | None]]) -> str:
    """A hash of names and bytes. Different tensors get the same hash only by chance."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    hashed = hashlib.sha256()
    for name, tensor in items:
        hashed.update(name.encode())
        if tensor is not None and tensor.numel():
            hash_bytes(hashed, dense(tensor).reshape(-1).cpu().contiguous())
    return hashed.hexdigest()


# Digests of the examples that a rank is given, by leaf: do all processes build one batch?

SIMPLE = (str, bytes, int, float, complex, type(None), np.generic)
"""Leaves whose text says everything about them. Objects of other types are not digested."""

Digests = Mapping[str, str]
"""Path of a leaf -> digest of its examples."""


def digest_leaves(batches: Sequence[Any]) -> Digests:
    """The digest of every leaf, over all these batches; empty for an object that has no digest."""
    texts: dict[str, list[str]] = {}
    for batch in batches:
        simple: dict[str, list[str]] = {}
        for path, leaf in leaves_of(batch):
            if isinstance(leaf, Tensor):
                described = f"{leaf.dtype} {tuple(leaf.shape)} "
                texts.setdefault(path, []).append(digest(iter([(described, leaf)])))
            elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
                described = f"{leaf.dtype} {leaf.shape} "
                data = torch.frombuffer(bytearray(leaf.tobytes() + b"\0"), dtype=torch.uint8)
                texts.setdefault(path, []).append(digest(iter([(described, data)])))
            elif isinstance(leaf, SIMPLE):
                # A list of names has a leaf for every example. They get one digest together.
                simple.setdefault(path.rpartition("[")[0] or path, []).append(repr(leaf))
            else:
                hidden = sorted(digest(iter([("", one)])) for one in hidden_tensors(leaf))
                texts.setdefault(path, []).extend(hidden)
        for path, entries in simple.items():
            texts.setdefault(path, []).append(digest(iter([(", ".join(entries), None)])))
    return {path: " ".join(parts) for path, parts in texts.items()}


@dataclass(frozen=True)
class DataByRank:
    """The digests of what every rank must be given, and how the ranks are given it."""

    by_rank: tuple[Digests, ...]
    undivided: bool
    together: bool

    def of_batch(self, case: Case, whole: Any, sizes: Sequence[int]) -> DataByRank:
        """The digests for another batch of the case."""
        return data_by_rank(case, whole, sizes, undivided=self.undivided, together=self.together)


def data_by_rank(
    case: Case, whole: Any, sizes: Sequence[int], *, undivided: bool, together: bool
) -> DataByRank:
    """The digests of ranks that build this batch. The arguments are those of ``given_to``."""
    ranks = case.ranks.world_size
    undivided = undivided or case.shards == OWN
    given = (
        given_to(rank, case, whole, sizes, undivided=undivided, together=together)
        for rank in range(1 if undivided else ranks)
    )
    digests = tuple(map(digest_leaves, given))
    return DataByRank(digests * ranks if undivided else digests, undivided, together)


def differing_leaf(one: Digests, other: Digests) -> str | None:
    """The path of the first leaf that differs; None if all are the same."""
    paths = [*one, *(path for path in other if path not in one)]
    return next((path or "batch" for path in paths if one.get(path) != other.get(path)), None)
