"""How many optimizer steps an epoch has, and how many examples are repeated or left out."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.commands.explain.setup import Setup


@dataclass(frozen=True)
class Epoch:
    """One pass over the dataset.

    ``examples_each``: the examples of a rank. ``micro_batches``: the number of its batches; the
    last one has ``last_batch`` examples. ``full_steps``: the optimizer steps that accumulate all
    their micro-batches. ``rest``: the micro-batches that are left for a shorter last step.
    ``largest_step``: the examples of the largest step, over all ranks, and ``last_step`` those of
    the last one. ``repeated``: how many more examples the ranks get than there are, so that all
    ranks get equally many. If there are fewer examples than ranks, some are repeated more than
    once. ``dropped``: the examples that no rank sees.
    """

    examples_each: int
    micro_batches: int
    last_batch: int
    full_steps: int
    rest: int
    largest_step: int
    last_step: int
    repeated: int
    dropped: int

    @property
    def steps(self) -> int:
        """The optimizer steps, if the loop also takes a shorter last step."""
        return self.full_steps + bool(self.rest)


def epoch_of(setup: Setup) -> Epoch | None:
    """The epoch of DistributedSampler(shuffle=True) and DataLoader(batch_size, drop_last).

    None if the size of the dataset is not known. The sampler's own ``drop_last`` is False: it
    appends repeated examples at the end, so the DataLoader drops these first. Accelerate's
    ``even_batches`` deals whole batches in turn instead, and fills up the last ones.
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
    of_last = ((rest or setup.accumulation) - 1) * setup.batch + last_batch
    first_is_last = full_steps + bool(rest) == 1
    return Epoch(
        examples_each=each,
        micro_batches=micro_batches,
        last_batch=last_batch,
        full_steps=full_steps,
        rest=rest,
        largest_step=of_last * setup.processes if first_is_last else setup.effective_batch,
        last_step=of_last * setup.processes,
        repeated=0 if drops else max(0, each * setup.processes - setup.examples),
        dropped=max(0, setup.examples - seen) if setup.drop_last else 0,
    )
