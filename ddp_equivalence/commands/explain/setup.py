"""How somebody trains, in the words of the command line, and what trainers set by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from ddp_equivalence.case.errors import BadCase, one_of

Loss = Literal["mean", "sum", "token-mean"]
TokensOver = Literal["micro-batch", "step", "all-ranks"]
Parallelism = Literal[
    "ddp", "data-parallel", "data-parallel-loss-inside", "hybrid", "all-reduce-sum", "none"
]
Optimizer = Literal["sgd", "adam", "adamw"]
Sampler = Literal["distributed", "even-batches"]

CHOICES = {
    "loss": get_args(Loss),
    "tokens_over": get_args(TokensOver),
    "parallelism": get_args(Parallelism),
    "optimizer": get_args(Optimizer),
    "sampler": get_args(Sampler),
}
LARGEST = 10**12
LARGEST_COUNTS = {
    "batch": LARGEST,
    "nodes": LARGEST,
    "accumulation": LARGEST,
    "ranks_per_node": 10**5,  # the parts of a batch are listed one by one
    "examples": LARGEST,
}
"""The largest counts accepted: larger ones are typing errors."""

ADAM_BETAS = (Fraction(9, 10), Fraction(999, 1000))
"""The default of torch.optim.Adam and AdamW."""

ONE_PROCESS = ("data-parallel", "data-parallel-loss-inside", "none")
WITH_REPLICAS = ("data-parallel", "data-parallel-loss-inside", "hybrid")

NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?"
KNOWN_GOOD = re.compile(rf"\s*(\d{{1,13}})\s*@\s*({NUMBER})\s*", re.ASCII)
LOSS_TIMES = re.compile(rf"([*/]?)({NUMBER}|world-size)", re.ASCII)


@dataclass(frozen=True)
class KnownGood:
    """The effective ``batch`` and ``learning_rate`` that worked on one device.

    ``loss``: the reduction of the loss over that batch. Raises BadCase for a field that cannot be
    right.
    """

    batch: int
    learning_rate: Fraction
    loss: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_count("known_good", self.batch, LARGEST)
        rate = self.learning_rate
        if not isinstance(rate, Fraction) or not Fraction(1, 10**30) <= rate <= 10**30:
            raise BadCase("known_good", rate, "a learning rate from 1e-30 to 1e30, as a Fraction")
        check_choice("known_loss", self.loss, ("mean", "sum"))

    @classmethod
    def read(cls, text: str, loss: Literal["mean", "sum"] = "mean") -> KnownGood:
        """Read ``BATCH@LR``, such as ``16@0.01``. Raises BadCase for anything else."""
        found = KNOWN_GOOD.fullmatch(text)
        if found is None:
            raise BadCase("known_good", text, "BATCH@LR, the batch first, such as 16@0.01")
        return cls(int(found[1]), Fraction(found[2]), loss)

    @property
    def factor(self) -> int:
        """The gradient of the loss that worked, as a multiple of the gradient of the mean loss."""
        return self.batch if self.loss == "sum" else 1


@dataclass(frozen=True)
class Epoch:
    """One pass over the dataset with torch's or Accelerate's sampler.

    ``examples_each``: the examples of a rank, in ``micro_batches``; the last one has ``last_batch``
    examples. ``steps``: the optimizer steps, if the loop also takes a shorter last one, which has
    ``rest`` micro-batches; 0 if the last one is whole. ``last_step``: the examples of the last step
    over all ranks. ``repeated``: how many more examples the ranks get than there are.
    """

    examples_each: int
    micro_batches: int
    last_batch: int
    steps: int
    rest: int
    last_step: int
    repeated: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which ranks train, on which batches, and with which loss.

    The fields are options of ``ddp-equivalence explain``, whose help describes them. ``loss_times``
    is a text such as "1/64" or "world-size/8". ``accumulation_divided`` is None if there is one
    micro-batch. ``like``: the trainer that ``setup_like`` made it for.

    Raises BadCase for a field that cannot be right or that contradicts another one.
    """

    batch: int
    nodes: int = 1
    ranks_per_node: int = 1
    accumulation: int = 1
    accumulation_divided: bool | None = None
    loss: Loss = "mean"
    loss_times: str = "1"
    tokens_over: TokensOver = "micro-batch"
    parallelism: Parallelism = "ddp"
    known_good: KnownGood | None = None
    examples: int | None = None
    optimizer: Optimizer = "sgd"
    betas: tuple[Fraction, Fraction] = ADAM_BETAS
    sampler: Sampler = "distributed"
    like: str | None = None

    def __post_init__(self) -> None:
        for field, most in LARGEST_COUNTS.items():
            if field != "examples" or self.examples is not None:
                check_count(field, getattr(self, field), most)
        for field, choices in CHOICES.items():
            check_choice(field, getattr(self, field), choices)
        for field, right in _contradictions(self):
            raise BadCase(field, getattr(self, field, "sum"), right)
        assert self.loss_factor  # reads the text

    @property
    def is_adam(self) -> bool:
        """True for Adam and AdamW, which both cancel a constant factor of the gradient."""
        return self.optimizer != "sgd"

    @property
    def loss_factor(self) -> Fraction:
        """The factor of each loss. Raises BadCase if the text cannot be read."""
        value = Fraction(1)
        try:
            for sign, word in LOSS_TIMES.findall(self.loss_times):
                term = Fraction(self.processes if word == "world-size" else word)
                value *= 1 / term if sign == "/" else term
        except ZeroDivisionError:
            value = Fraction(0)
        said = "".join(map("".join, LOSS_TIMES.findall(self.loss_times)))
        if said != self.loss_times or not 10**-30 < value < 10**30:
            right = "numbers above 0 and world-size, joined by * or /, such as 1/64 or world-size/8"
            raise BadCase("loss_times", self.loss_times, right)
        return value

    @property
    def processes(self) -> int:
        """The processes that train together, each with a batch of its own: the world size."""
        if self.parallelism in ONE_PROCESS:
            return 1
        return self.nodes if self.parallelism == "hybrid" else self.nodes * self.ranks_per_node

    @property
    def framework_divisor(self) -> int:
        """The number by which the sum of all processes' gradients is divided."""
        return self.processes if self.parallelism in ("ddp", "hybrid") else 1

    @property
    def replicas(self) -> int:
        """The GPUs that one process drives."""
        return self.ranks_per_node if self.parallelism in WITH_REPLICAS else 1

    def replica_sizes(self, batch: int) -> list[int]:
        """The examples of each replica that gets any; nn.DataParallel cuts by ``Tensor.chunk``."""
        size = -(-batch // self.replicas)
        return [min(size, batch - start) for start in range(0, batch, size)]

    def loss_sizes(self, batch: int) -> list[int]:
        """The examples that each loss of one micro-batch sees in one process."""
        inside = self.parallelism == "data-parallel-loss-inside"
        return self.replica_sizes(batch) if inside else [batch]

    @property
    def effective_batch(self) -> int:
        """The examples of one optimizer step, over all ranks and micro-batches."""
        return self.batch * self.processes * self.accumulation

    @property
    def epoch(self) -> Epoch | None:
        """The epoch of the sampler and a DataLoader that keeps its last batch; None if not known.

        DistributedSampler appends repeated examples at the end. Accelerate's ``even_batches`` deals
        whole batches in turn instead, and fills up the last ones; it leaves one process its loader.
        """
        if self.examples is None:
            return None
        batch, ranks = self.batch, self.processes
        full = self.sampler == "even-batches" and ranks > 1
        unit = batch if full else 1
        each = -(-self.examples // (unit * ranks)) * unit
        micro_batches = -(-each // batch)
        last_batch = each - (micro_batches - 1) * batch
        steps, rest = -(-micro_batches // self.accumulation), micro_batches % self.accumulation
        return Epoch(
            examples_each=each,
            micro_batches=micro_batches,
            last_batch=last_batch,
            steps=steps,
            rest=rest,
            last_step=(((rest or self.accumulation) - 1) * batch + last_batch) * ranks,
            repeated=each * ranks - self.examples,
        )


def _contradictions(setup: Setup) -> Iterator[tuple[str, str]]:
    """Each field that cannot be right beside the others, and what would be."""
    divided = setup.accumulation_divided
    known: object = setup.known_good  # whatever the caller gave
    known_sum = isinstance(known, KnownGood) and known.loss == "sum"
    if setup.parallelism in ONE_PROCESS and setup.nodes > 1:
        others = "for several use ddp, hybrid or all-reduce-sum"
        yield "nodes", f"1: {setup.parallelism} is one process; {others}"
    if setup.parallelism == "none" and setup.ranks_per_node > 1:
        right = "several ranks without any parallelism are separate trainings; name a parallelism"
        yield "ranks_per_node", f"1: {right}"
    if setup.accumulation == 1 and divided is not None:
        right = "left out: with one micro-batch a step there is no accumulation"
        yield "accumulation_divided", right
    if setup.accumulation > 1 and not isinstance(divided, bool):
        yield (
            "accumulation_divided",
            f"given: True (--accumulation-divided) if the loss of each of {setup.accumulation} "
            "micro-batches is divided by their number, or False (--accumulation-not-divided)",
        )
    if setup.tokens_over != "micro-batch" and setup.loss != "token-mean":
        yield "tokens_over", "left out, unless the loss is token-mean: only tokens are counted"
    if len(setup.betas) != 2 or not all(0 <= beta < 1 for beta in setup.betas):
        yield "betas", "two Fractions from 0, below 1"
    if setup.betas != ADAM_BETAS and not setup.is_adam:
        yield "betas", "left out, unless the optimizer is adam or adamw"
    if not isinstance(known, KnownGood | None):
        yield "known_good", "a KnownGood, such as KnownGood.read('16@0.01')"
    if known_sum and setup.loss == "token-mean":
        yield (
            "known_loss",
            "mean: a loss summed over tokens grows with their number, which is not given here. "
            "Multiply that learning rate by the number of tokens of its batch",
        )


def check_count(field: str, value: object, most: int) -> None:
    """Raises BadCase unless ``value`` is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadCase(field, value, f"a whole number from 1 to {most}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises BadCase unless ``value`` is one of the choices."""
    if value not in choices:
        raise BadCase(field, value, one_of(choices, value))


# The trainers that ``--like`` knows, read in the sources of transformers 5.24, Accelerate 1.15 and
# Lightning 2.6, and in train.py of nanoGPT at commit 3adf61e.

DEFAULTS: Mapping[str, dict[str, Any]] = {
    "hf-trainer": {"loss": "token-mean", "optimizer": "adamw", "sampler": "even-batches"},
    "accelerate": {"sampler": "even-batches"},
    "lightning": {},
    "nanogpt": {"optimizer": "adamw"},
}
"""The fields that each trainer sets, unless they are given."""

SAYS = {
    "hf-trainer": "Like the Trainer of transformers with average_tokens_across_devices (from 4.54 "
    "on). For releases from 4.46 on give --tokens-over step, for earlier ones micro-batch; for a "
    "model whose loss takes no token count, --loss mean.",
    "accelerate": "Like Accelerate: accelerator.backward divides by gradient_accumulation_steps, "
    "also in a shorter last step of an epoch. Without split_batches, a scheduler that it has "
    "prepared moves on by {setup.processes} steps at every optimizer step.",
    "lightning": 'Like Lightning\'s Trainer(strategy="ddp"): it adds a DistributedSampler, and '
    "divides each loss by accumulate_grad_batches, also in a shorter last step of an epoch.",
    "nanogpt": "Like train.py of nanoGPT, whose gradient_accumulation_steps are those of all "
    "{setup.processes} ranks together, {setup.accumulation} on each. All its sequences have "
    "equally many tokens.",
}
"""Sentences on what each trainer does that its user may not know."""


def setup_like(name: str, **given: Any) -> Setup:
    """A Setup with what this trainer sets, unless it is given.

    ``name``: one of the trainers in DEFAULTS. ``given``: fields of Setup; None stands for one that
    is not given. ``accumulation`` is the trainer's own setting, and ``loss_times`` what the user
    multiplies by beside the trainer.

    Raises BadCase for a name that is none, and for fields that this trainer cannot have.
    """
    check_choice("like", name, tuple(DEFAULTS))
    given = {field: value for field, value in given.items() if value is not None}
    never = {"parallelism": "stands for one process for each GPU (torchrun)"}
    never["accumulation_divided"] = "divides or does not divide by itself"
    if name == "nanogpt":
        never |= dict.fromkeys(("examples", "sampler"), "has no epochs")
    for field, why in never.items():
        if field in given:
            raise BadCase(field, given[field], f"left out with --like {name}, which {why}")
    fields = DEFAULTS[name] | {"like": name} | given
    divided = True
    if name == "nanogpt":
        fields = _nanogpt(fields)
    elif name == "hf-trainer" and fields["loss"] == "token-mean":
        fields.setdefault("tokens_over", "all-ranks")
        divided = fields["tokens_over"] == "micro-batch"
        if fields["tokens_over"] == "all-ranks":  # the Trainer multiplies after the user
            fields["loss_times"] = f"{fields.get('loss_times', '1')}*world-size"
    if fields.get("accumulation", 1) != 1:
        fields["accumulation_divided"] = divided
    return Setup(**fields)


def _nanogpt(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["optimizer"] != "sgd":
        fields = {"betas": (Fraction(9, 10), Fraction(95, 100))} | fields
    ranks = fields.get("nodes", 1) * fields.get("ranks_per_node", 1)
    steps = fields.get("accumulation", ranks)
    check_count("accumulation", steps, LARGEST)
    if steps % ranks:
        right = f"a multiple of the {ranks} ranks, over which nanoGPT divides its micro-batches"
        raise BadCase("accumulation", steps, right)
    return fields | {"accumulation": steps // ranks}
