"""Setup: how somebody trains, in the words of the command line.

A Setup refuses fields that cannot be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain.known_good import KnownGood, check_choice, check_count
from ddp_equivalence.commands.explain.loss_factor import UNCHANGED, LossFactor

Loss = Literal["mean", "sum", "token-mean"]
TokensOver = Literal["micro-batch", "step", "all-ranks"]
Parallelism = Literal[
    "ddp", "data-parallel", "data-parallel-loss-inside", "hybrid", "all-reduce-sum", "none"
]
Optimizer = Literal["sgd", "adam", "adamw"]
Sampler = Literal["distributed", "even-batches"]

ADAM_BETAS = (Fraction(9, 10), Fraction(999, 1000))
"""The default of torch.optim.Adam and AdamW."""

MOST_RANKS_A_NODE = 10**5
"""The most ranks on a node. The shares of a batch are listed one by one, so there is a limit."""
ONE_PROCESS = ("data-parallel", "data-parallel-loss-inside", "none")
WITH_REPLICAS = ("data-parallel", "data-parallel-loss-inside", "hybrid")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which ranks train, on which batches, and with which loss.

    ``batch``: the examples that one process takes for one micro-batch. nn.DataParallel and "hybrid"
    have one process on each node, which splits this batch over replicas on ``ranks_per_node`` GPUs.
    ``accumulation``: the micro-batches of one optimizer step. ``accumulation_divided``: whether the
    loss of each micro-batch is divided by their number; None if there is only one. ``loss``: the
    reduction of each rank's loss. ``loss_times``: what each loss is multiplied by. ``tokens_over``:
    whose tokens a mean over tokens divides by: those of its own micro-batch, of all micro-batches
    of its process, or of those of all ranks. ``parallelism``: "hybrid" is DataParallel inside each
    node and DDP between the nodes; "all-reduce-sum" is the user's own all_reduce, which does not
    divide. ``known_good``: a learning rate that worked on one device. ``examples``: the size of the
    dataset. ``drop_last``: the DataLoader's ``drop_last``. ``sampler``: how the dataset is dealt:
    torch's DistributedSampler, or Accelerate's ``even_batches``, with which all batches are full.
    ``betas``: those of Adam. ``like``: the trainer that ``setup_like`` made it for.

    Raises BadCase for a field that cannot be right or that contradicts another one.
    """

    batch: int
    nodes: int = 1
    ranks_per_node: int = 1
    accumulation: int = 1
    accumulation_divided: bool | None = None
    loss: Loss = "mean"
    loss_times: LossFactor = UNCHANGED
    tokens_over: TokensOver = "micro-batch"
    parallelism: Parallelism = "ddp"
    known_good: KnownGood | None = None
    examples: int | None = None
    drop_last: bool = False
    optimizer: Optimizer = "sgd"
    betas: tuple[Fraction, Fraction] = ADAM_BETAS
    sampler: Sampler = "distributed"
    like: str | None = None

    def __post_init__(self) -> None:
        for field in ("batch", "nodes", "accumulation"):
            check_count(field, getattr(self, field))
        check_count("ranks_per_node", self.ranks_per_node, MOST_RANKS_A_NODE)
        check_choice("loss", self.loss, get_args(Loss))
        check_choice("parallelism", self.parallelism, get_args(Parallelism))
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("tokens_over", self.tokens_over, get_args(TokensOver))
        check_choice("sampler", self.sampler, get_args(Sampler))
        self._check_loss()
        self._check_betas()
        self._check_known_good()
        self._check_processes()
        self._check_accumulation()
        self._check_epoch()

    def _check_loss(self) -> None:
        given: object = self.loss_times
        if not isinstance(given, LossFactor):
            right = "a LossFactor, such as LossFactor.read('world-size')"
            raise BadCase("loss_times", given, right)
        if self.tokens_over != "micro-batch" and self.loss != "token-mean":
            right = "left out, unless the loss is token-mean: only tokens are counted"
            raise BadCase("tokens_over", self.tokens_over, right)

    def _check_betas(self) -> None:
        betas: object = self.betas
        two = isinstance(betas, tuple) and len(betas) == 2
        if not two or not all(isinstance(one, Fraction) and 0 <= one < 1 for one in self.betas):
            raise BadCase("betas", betas, "two Fractions from 0, below 1")
        if self.betas != ADAM_BETAS and not self.is_adam:
            raise BadCase("betas", betas, "left out, unless the optimizer is adam or adamw")

    def _check_known_good(self) -> None:
        known = self.known_good
        if known is None:
            return
        if not isinstance(known, KnownGood):
            raise BadCase("known_good", known, "a KnownGood, such as KnownGood.read('16@0.01')")
        if known.loss == "sum" and self.loss == "token-mean":
            right = (
                "mean: a loss summed over tokens grows with their number, which is not given here. "
                "Multiply that learning rate by the number of tokens of its batch, and give the "
                "product as the learning rate of a mean"
            )
            raise BadCase("known_loss", known.loss, right)

    def _check_processes(self) -> None:
        if self.parallelism in ONE_PROCESS and self.nodes > 1:
            what = "training on one device" if self.parallelism == "none" else "nn.DataParallel"
            right = f"1: {what} is one process; for several use ddp, hybrid or all-reduce-sum"
            raise BadCase("nodes", self.nodes, right)
        if self.parallelism == "none" and self.ranks_per_node > 1:
            right = (
                "1: several ranks without any parallelism are separate trainings; name a "
                "parallelism"
            )
            raise BadCase("ranks_per_node", self.ranks_per_node, right)

    def _check_accumulation(self) -> None:
        divided = self.accumulation_divided
        if self.accumulation == 1 and divided is not None:
            right = "left out: with one micro-batch a step there is no accumulation"
            raise BadCase("accumulation_divided", divided, right)
        if self.accumulation > 1 and not isinstance(divided, bool):
            right = (
                "say whether each micro-batch's loss is divided by "
                f"{self.accumulation} (--accumulation-divided) or not (--accumulation-not-divided)"
            )
            raise BadCase("accumulation_divided", divided, right)

    def _check_epoch(self) -> None:
        if self.examples is None:
            if self.sampler != "distributed" and self.like is None:
                right = "left out, unless the dataset's size is given as --examples"
                raise BadCase("sampler", self.sampler, right)
            if self.drop_last:
                right = "left out, unless the dataset's size is given as --examples"
                raise BadCase("drop_last", self.drop_last, right)
            return
        check_count("examples", self.examples)
        each = self.examples_per_process
        if self.drop_last and self.deals_full_batches:
            each = self.examples // self.processes
        if self.drop_last and each is not None and each < self.batch:
            whose = "there are" if self.processes == 1 else f"each of {self.processes} ranks gets"
            right = (
                f"at most {each}, the examples that {whose}: with a larger batch, drop_last leaves "
                "no step in an epoch"
            )
            raise BadCase("batch", self.batch, right)

    @property
    def is_adam(self) -> bool:
        """True for Adam and AdamW, which both cancel a constant factor of the gradient."""
        return self.optimizer != "sgd"

    @property
    def processes(self) -> int:
        """The processes that train together, each with a batch of its own: the world size."""
        if self.parallelism in ONE_PROCESS:
            return 1
        return self.nodes if self.parallelism == "hybrid" else self.nodes * self.ranks_per_node

    @property
    def replicas(self) -> int:
        """The GPUs that one process drives."""
        return self.ranks_per_node if self.parallelism in WITH_REPLICAS else 1

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        """The examples of each replica that gets any; nn.DataParallel cuts by ``Tensor.chunk``."""
        size = -(-self.batch // self.replicas)
        starts = range(0, self.batch, size)
        return tuple(min(size, self.batch - start) for start in starts)

    @property
    def loss_sizes(self) -> tuple[int, ...]:
        """The examples that each loss of one micro-batch sees in one process."""
        inside = self.parallelism == "data-parallel-loss-inside"
        return self.replica_sizes if inside else (self.batch,)

    @property
    def effective_batch(self) -> int:
        """The examples of one optimizer step, over all ranks and micro-batches."""
        return self.batch * self.processes * self.accumulation

    @property
    def examples_per_process(self) -> int | None:
        """The examples that the sampler gives each rank in an epoch."""
        if self.examples is None:
            return None
        if self.deals_full_batches:
            batches = (
                self.examples // self.batch if self.drop_last else -(-self.examples // self.batch)
            )
            each = batches // self.processes if self.drop_last else -(-batches // self.processes)
            return each * self.batch
        return -(-self.examples // self.processes)

    @property
    def deals_full_batches(self) -> bool:
        """True if every rank gets full batches only. Accelerate leaves one process its loader."""
        return self.sampler == "even-batches" and self.processes > 1


def token_counts(setup: Setup) -> int:
    """By how many counts of tokens the losses of one step are divided."""
    of_each_process = len(setup.loss_sizes) * setup.accumulation
    counts = {
        "micro-batch": of_each_process * setup.processes,
        "step": setup.processes,
        "all-ranks": 1,
    }
    return counts[setup.tokens_over]


def framework_divisor(setup: Setup) -> int:
    """The number by which the sum of all processes' gradients is divided."""
    return setup.processes if setup.parallelism in ("ddp", "hybrid") else 1
