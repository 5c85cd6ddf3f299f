"""How many optimizer steps an epoch has, and which examples are repeated or left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ddp_equivalence.commands.explain.setup import Setup


@dataclass(frozen=True)
class Epoch:
    """One pass over the dataset.

    ``examples_each``: what a rank gets, ``micro_batches``: in how many batches, the last one of
    ``last_batch`` examples, of which each loss sees ``last_sizes``. ``full_steps``: optimizer steps
    with all micro-batches of a window; ``rest``: micro-batches left over for a shorter one.
    ``largest_step``: examples of the largest step, over all ranks. ``repeated``: how many more
    examples are dealt than there are, to give every rank as many: some are seen again, more than
    once if there are fewer than ranks. ``dropped``: examples that are not seen.
    """

    examples_each: int
    micro_batches: int
    last_batch: int
    last_sizes: tuple[int, ...]
    full_steps: int
    rest: int
    largest_step: int
    repeated: int
    dropped: int

    @property
    def steps(self) -> int:
        """Optimizer steps, if the loop steps on a shorter last window too."""
        return self.full_steps + bool(self.rest)


def epoch_of(setup: Setup) -> Epoch | None:
    """The epoch of DistributedSampler(shuffle=True) and DataLoader(batch_size, drop_last).

    None where the size of the dataset is not known. The sampler's own ``drop_last`` is left at
    False: it appends repeated examples at the end, so that these are what a DataLoader drops first.
    """
    each = setup.examples_per_process
    if setup.examples is None or each is None:
        return None
    whole, remainder = divmod(each, setup.batch)
    short = remainder > 0 and not setup.drop_last
    micro_batches = whole + short
    full_steps, rest = divmod(micro_batches, setup.accumulation)
    drops = remainder > 0 and setup.drop_last
    seen = whole * setup.batch * setup.processes
    last_batch = remainder if short else setup.batch
    first_is_last = full_steps + bool(rest) == 1
    return Epoch(
        examples_each=each,
        micro_batches=micro_batches,
        last_batch=last_batch,
        last_sizes=replace(setup, batch=last_batch).loss_sizes,
        full_steps=full_steps,
        rest=rest,
        largest_step=((rest or setup.accumulation) - 1) * setup.batch * setup.processes
        + last_batch * setup.processes
        if first_is_last
        else setup.effective_batch,
        repeated=0 if drops else each * setup.processes - setup.examples,
        dropped=setup.examples - seen if drops else 0,
    )


def last_sum(setup: Setup, epoch: Epoch) -> Fraction:
    """The gradient of the epoch's last step over that of a whole one, where losses are sums.

    Losses of replicas are sums over their own examples, of which the mean is taken.
    """
    whole_batch = Fraction(setup.batch, len(setup.loss_sizes))
    before = (epoch.rest or setup.accumulation) - 1
    last = before * whole_batch + Fraction(epoch.last_batch, len(epoch.last_sizes))
    return last / (setup.accumulation * whole_batch)
