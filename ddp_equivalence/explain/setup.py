"""Setup: how somebody trains, in the words of the command line, and refused where it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from ddp_equivalence.errors import BadCase

Loss = Literal["mean", "sum", "token-mean"]
Parallelism = Literal[
    "ddp", "data-parallel", "data-parallel-loss-inside", "hybrid", "all-reduce-sum", "none"
]
Optimizer = Literal["sgd", "adam"]

ONE_PROCESS = ("data-parallel", "data-parallel-loss-inside", "none")
WITH_REPLICAS = ("data-parallel", "data-parallel-loss-inside", "hybrid")
LARGEST = 10**12
"""Larger counts are slips of the finger."""


@dataclass(frozen=True)
class KnownGood:
    """The effective ``batch`` and ``learning_rate`` that worked on one device.

    ``loss``: "mean", or "sum" where that loss was added up over the batch.
    Raises BadCase for a field that cannot be right.
    """

    batch: int
    learning_rate: Fraction
    loss: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check_count("known_good", self.batch)
        rate = self.learning_rate
        if not isinstance(rate, Fraction) or rate <= 0:
            raise BadCase("known_good", rate, "a learning rate above 0, as a Fraction")
        if self.loss not in ("mean", "sum"):
            raise BadCase("known_loss", self.loss, "mean or sum")

    @classmethod
    def read(cls, text: str, loss: Literal["mean", "sum"] = "mean") -> KnownGood:
        """``BATCH@LR`` such as ``16@0.01``. Raises BadCase if it is anything else."""
        right = "BATCH@LR with a whole batch from 1 and a learning rate above 0, such as 16@0.01"
        batch, at, rate = text.partition("@")
        try:
            known = int(batch), float(rate)
        except ValueError:
            raise BadCase("known_good", text, right) from None
        if not at or not 1 <= known[0] <= LARGEST or not 0 < known[1] < float("inf"):
            raise BadCase("known_good", text, right)
        return cls(known[0], Fraction(rate.strip()), loss)

    @property
    def factor(self) -> Fraction:
        """Its gradient, in gradients of its mean loss."""
        return Fraction(self.batch if self.loss == "sum" else 1)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Who trains on what, and what the loss is.

    ``batch``: examples that one process takes for one micro-batch; nn.DataParallel and "hybrid"
    split it over ``ranks_per_node`` GPUs, which there are replicas in one process a node.
    ``accumulation``: micro-batches per optimizer step; ``accumulation_divided``: whether each one's
    loss is divided by their number (None where there is one). ``loss``: what it is on each rank.
    ``parallelism``: "hybrid" is DataParallel inside each node and DDP between them,
    "all-reduce-sum" one's own all_reduce that divides by nothing. ``examples``: of the dataset.
    ``drop_last``: as the DataLoader's.

    Raises BadCase for a field that cannot be right, or contradicts another.
    """

    batch: int
    nodes: int = 1
    ranks_per_node: int = 1
    accumulation: int = 1
    accumulation_divided: bool | None = None
    loss: Loss = "mean"
    parallelism: Parallelism = "ddp"
    known_good: KnownGood | None = None
    examples: int | None = None
    drop_last: bool = False
    optimizer: Optimizer = "sgd"

    def __post_init__(self) -> None:
        for field in ("batch", "nodes", "ranks_per_node", "accumulation"):
            _check_count(field, getattr(self, field))
        _check_choice("loss", self.loss, get_args(Loss))
        _check_choice("parallelism", self.parallelism, get_args(Parallelism))
        _check_choice("optimizer", self.optimizer, get_args(Optimizer))
        self._check_processes()
        self._check_accumulation()
        self._check_epoch()

    def _check_processes(self) -> None:
        if self.parallelism in ONE_PROCESS and self.nodes > 1:
            what = "training on one device" if self.parallelism == "none" else "nn.DataParallel"
            right = f"1: {what} is one process; several are ddp, hybrid or all-reduce-sum"
            raise BadCase("nodes", self.nodes, right)
        if self.parallelism == "none" and self.ranks_per_node > 1:
            right = "1: several ranks without any parallelism are separate trainings; name one"
            raise BadCase("ranks_per_node", self.ranks_per_node, right)

    def _check_accumulation(self) -> None:
        divided = self.accumulation_divided
        if self.accumulation == 1 and divided is not None:
            right = "left out: with one micro-batch a step there is no accumulation"
            raise BadCase("accumulation_divided", divided, right)
        if self.accumulation > 1 and not isinstance(divided, bool):
            right = (
                f"whether each micro-batch's loss is divided by {self.accumulation}: "
                "--accumulation-divided or --accumulation-not-divided"
            )
            raise BadCase("accumulation_divided", divided, right)

    def _check_epoch(self) -> None:
        if self.examples is None:
            if self.drop_last:
                right = "left out, or the dataset's size given as examples"
                raise BadCase("drop_last", self.drop_last, right)
            return
        _check_count("examples", self.examples)
        each = self.examples_per_process
        if self.drop_last and each is not None and each < self.batch:
            whose = "there are" if self.processes == 1 else f"each of {self.processes} ranks gets"
            right = f"at most {each}, the examples that {whose}: drop_last leaves 0 steps an epoch"
            raise BadCase("batch", self.batch, right)

    @property
    def processes(self) -> int:
        """How many train together, each with a batch of its own: the world size."""
        if self.parallelism in ONE_PROCESS:
            return 1
        return self.nodes if self.parallelism == "hybrid" else self.nodes * self.ranks_per_node

    @property
    def replicas(self) -> int:
        """GPUs that one process drives."""
        return self.ranks_per_node if self.parallelism in WITH_REPLICAS else 1

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        """Examples of every replica that gets any: nn.DataParallel scatters by ``Tensor.chunk``."""
        size = -(-self.batch // self.replicas)
        starts = range(0, self.batch, size)
        return tuple(min(size, self.batch - start) for start in starts)

    @property
    def loss_sizes(self) -> tuple[int, ...]:
        """Examples that each loss of one micro-batch sees in one process."""
        inside = self.parallelism == "data-parallel-loss-inside"
        return self.replica_sizes if inside else (self.batch,)

    @property
    def effective_batch(self) -> int:
        """Examples of one optimizer step, over all ranks and micro-batches."""
        return self.batch * self.processes * self.accumulation

    @property
    def examples_per_process(self) -> int | None:
        """What DistributedSampler gives each rank in an epoch."""
        return None if self.examples is None else -(-self.examples // self.processes)


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise BadCase(field, value, "a whole number from 1")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadCase(field, value, f"one of {', '.join(choices)}")
