"""The model or the loss makes the difference, not the reduction: statistics, draws, buffers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.causes.losses import is_mean_over_examples
from ddp_equivalence.diagnosis.divisors import weights_of_parts, why_not_additive
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, on_every_rank
from ddp_equivalence.diagnosis.lines.of_loss import (
    BATCH_NORMS,
    COMPARISONS,
    DROPOUTS,
    STATISTICS,
    buffer_changes,
    buffers_apart,
    draw_lines,
    forwards_of,
    loss_lines,
    module_lines,
)
from ddp_equivalence.diagnosis.lines.source import called_name, place_of, run_lines
from ddp_equivalence.diagnosis.lines.words import last_of, names_text
from ddp_equivalence.diagnosis.means_of_parts import is_mean_of_blocks
from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Forward

NO_GRADIENT = 1e-9
"""A gradient with a smaller norm, relative to the big batch's, is only rounding."""

EXAMPLES_TRIED = 3
"""This many single examples without a gradient show that the loss compares examples."""

NEAR = 0.05
"""A loss is examined only if the mean of the ranks' gradients leaves less unexplained."""

MOST_LINES = 2


def _of_first_places(view: View) -> Sequence[Tensor]:
    """The gradients if each place of a tied weight had a weight of its own."""
    differing = view.measured.differing
    if not differing or not differing <= set(view.setting.tied):
        return ()
    return (view.examples.untied(),)


MAKE_NEW_PARAMETERS = ("to_empty",)
"""Functions of torch after which weights that were tied are not. Source: ``nn.Module.to_empty``
gives every place of a parameter memory of its own."""


def _lines_that_untie(view: View) -> Sequence[PointedLine]:
    """The calls that make new parameters for a module."""
    run = run_lines(view)
    found = []
    for file, node in run.nodes():
        if isinstance(node, ast.Call) and called_name(node) in MAKE_NEW_PARAMETERS:
            place = place_of(file, node.lineno)
            if place is not None and run.has_run(place):
                note = f"{called_name(node)} makes a parameter for each name"
                found.append(PointedLine(place.line(node), note, True))
    return found[:MOST_LINES]


def _means_of_parts(view: View, weighted: bool = False) -> list[Tensor]:
    """The means of what each part gives alone; [] if there is one part, or if they are not known.

    ``weighted``: also the mean that weights the ranks by their examples, as it is where a loss
    divides by a count of all ranks.
    """
    contributions = view.parts.contributions()
    if contributions is None or view.parts.count == 1:
        return []
    means = [contributions.mean(0)]
    if weighted:
        sizes = [len(shard) for shard in view.parts.examples_by_rank]
        rows = [size * row for size, row in zip(sizes, contributions, strict=True) if size]
        means += [torch.stack(rows).sum(0) / sum(sizes)] if rows else []
    return [*means, *view.averages_of_node_sums()]


def _with_local_statistics(view: View) -> Sequence[Prediction]:
    return on_every_rank(view, *_means_of_parts(view)) if view.setting.has_batch_norm else ()


def _coupled(name: str, *, also_unknown: bool = False) -> Callable[[View], Sequence[Prediction]]:
    """The mean of losses that compare the examples of one shard, where this is that coupling.

    ``also_unknown``: also where the loss is not known, and compares examples as far as can be seen.
    """

    def held(view: View) -> Sequence[Prediction]:
        coupling = view.setting.batch_coupled
        if coupling != name and not (also_unknown and coupling is None):
            return ()
        if view.parts.add_up_to_the_big_batch or view.setting.has_batch_norm:
            return ()
        means = _means_of_parts(view, weighted=True)
        if not means or view.examples.draws_random_numbers or not _compares_examples(view):
            return ()
        if is_mean_of_blocks(view):
            return ()  # it compares neighbours only, and ranks that read blocks would be right
        return on_every_rank(view, *(one for one in means if not nearly_equal(one, view.expected)))

    return held


def _compares_examples(view: View) -> bool:
    """True if the loss is known to compare examples, or if single examples have no gradient."""
    if view.setting.batch_coupled:
        return True
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    if is_mean_over_examples(view) or weights_of_parts(view, parts) is not None:
        return False
    tried = range(min(view.setting.example_count, EXAMPLES_TRIED))
    norms = [float(view.examples.gradient((index,)).nan_to_num(0.0).norm()) for index in tried]
    if max(norms, default=0.0) >= NO_GRADIENT * float(view.expected.norm()):
        return False
    # Where outputs are centred over the batch, a single example has no gradient, but a loss.
    losses = [abs(view.examples.loss((index,))) for index in tried]
    most = NO_GRADIENT * abs(view.examples.big_batch_loss)
    return all(isnan(loss) or loss <= most for loss in losses)


STATISTIC = "statistic_not_additive"


def _of_a_statistic(view: View) -> list[Tensor]:
    """The means that are near what the ranks hold, if the loss is another statistic than a mean."""
    setting = view.setting
    if not view.measured.is_known or setting.has_batch_norm:
        return []
    if setting.batch_coupled not in (STATISTIC, None):
        return []
    near = [
        mean
        for mean in _means_of_parts(view, weighted=True)
        if unexplained(view.measured.by_rank, view.on_every_rank(mean)) < NEAR
        and not nearly_equal(mean, view.expected)
    ]
    if not near or view.examples.draws_random_numbers or not why_not_additive(view):
        return []
    return near


def _why_no_mean(view: View) -> Indication | None:
    return Indication(True, why_not_additive(view)) if _of_a_statistic(view) else None


def _mean_over_forwards(
    view: View, gradient: Callable[[tuple[int, ...], Forward], Tensor]
) -> Sequence[Prediction]:
    """The mean over all forward passes of the ranks; () unless it is known what each one read."""
    contributions = []
    for rank, micro_batches in enumerate(view.observed.examples_read or ()):
        forwards = forwards_of(view, rank)
        if len(forwards) != len(micro_batches):
            return ()
        gradients = [gradient(*one) for one in zip(micro_batches, forwards, strict=True)]
        contributions.append(torch.stack(gradients).mean(0))
    return on_every_rank(view, torch.stack(contributions).mean(0)) if contributions else ()


def _with_own_masks(view: View) -> Sequence[Prediction]:
    """The masks that the ranks drew: those that were seen, and those drawn again from the states of
    their generators before each forward pass.
    """
    # The gradients that the ranks were seen to compute already contain the masks that they drew.
    observed = on_every_rank(view, *view.averages_of_node_sums())
    if not view.setting.draws_on_cpu:
        return observed

    def replayed(examples: tuple[int, ...], forward: Forward) -> Tensor:
        return view.examples.compute(examples, forward.generator).gradient

    return (*observed, *_mean_over_forwards(view, replayed))


def _with_other_masks(view: View) -> Sequence[Prediction]:
    contributions = view.parts.contributions()
    if contributions is None or not view.examples.draws_random_numbers:
        return ()
    # With the same seed on every rank, each rank draws the masks that its shard alone would get.
    # This is so on the device that predictions run on; another device has another generator.
    same_seed = [contributions.mean(0)] if view.parts.count > 1 else []
    return (*on_every_rank(view, *same_seed), *_with_own_masks(view))


def _with_the_same_masks(view: View) -> Sequence[Prediction]:
    if view.parts.count == 1 or not view.examples.draws_random_numbers:
        return ()
    return _with_own_masks(view)


def step_set_the_same_seed(view: View) -> bool | None:
    """True if the step itself set the same seed on all ranks; None if that is not known."""
    seeds = {
        tuple(forward.seed for forward in observation.forwards)
        for observation in view.observed.by_rank.values()
    }
    if not seeds or view.world_size == 1:
        return None
    return len(seeds) == 1 and view.setting.seed not in seeds.pop()


def _one_seed(view: View) -> Indication | None:
    if step_set_the_same_seed(view):
        return Indication(True, "the step set the same seed on all ranks before its forward pass")
    return Indication(False, "the step did not set the same seed on all ranks")


def _no_common_seed(view: View) -> Indication | None:
    """Speaks against other masks if the step set one seed on all ranks, which is another cause."""
    same = step_set_the_same_seed(view)
    return Indication(False, "the step gave all ranks the same seed") if same else None


def _lines_that_draw(view: View) -> Sequence[PointedLine]:
    """The first dropout in the forward pass; without one, the lines that draw random numbers."""
    modules = module_lines(view, DROPOUTS, "draws other masks for a shard than for the big batch")
    others = "draws random numbers, others for a shard than for the big batch: no fault"
    return modules or draw_lines(view, others)


def _same_seeds(view: View) -> list[CallSite]:
    places = view.observed.calls.places(Kind.SEED, where=lambda call: call.backwards == 0)
    return [
        place
        for place in places
        if len(place.ranks) == view.world_size
        and len({calls[-1].value for calls in place.by_rank.values()}) == 1
    ]


def _lines_that_seed(view: View) -> Sequence[PointedLine]:
    """Where all ranks are given the same seed, and the first dropout or other draw after it."""
    seeded = [
        place.pointed(f"seeds every rank with {place.first.value:.0f}", is_fault=True)
        for place in _same_seeds(view)[-1:]
    ]
    after = "drops the same positions on every rank"
    modules = module_lines(view, DROPOUTS, after, is_property=False)
    modules = modules or draw_lines(view, "draws the same numbers on every rank")[:1]
    return [*seeded, *(replace(one, is_fault=not seeded) for one in modules)]


def _with_own_buffers(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were each computed with the buffers of one rank.

    Empty where these are the gradients without them too, as in batch norm that trains.
    """
    if view.observed.examples_read is None or not buffers_apart(view):
        return ()
    draws = view.setting.draws_on_cpu and view.examples.draws_random_numbers
    reads_them: list[bool] = []

    def gradient(examples: tuple[int, ...], forward: Forward) -> Tensor:
        generator = forward.generator if draws else b""
        found = view.examples.compute(examples, generator, forward.buffers).gradient
        without = view.examples.compute(examples, generator).gradient
        reads_them.append(not nearly_equal(found, without))
        return found

    predictions = _mean_over_forwards(view, gradient)
    return predictions if any(reads_them) else ()


def _other_buffers(view: View) -> Indication | None:
    if not any(forwards_of(view, rank) for rank in view.observed.by_rank):
        return None
    apart = buffers_apart(view)
    if not apart:
        return Indication(False, "no buffer differed between the ranks before a forward pass")
    because = f"before the forward pass, {names_text(apart)} differed between the ranks"
    return Indication(True, because)


def _lines_of_buffers(view: View) -> Sequence[PointedLine]:
    apart = set(buffers_apart(view))
    places = [place for place in buffer_changes(view) if apart & set(place.names)]
    return [
        place.pointed(
            f"changes {names_text([name for name in place.names if name in apart])}, which "
            "differs between the ranks afterwards",
            is_fault=True,
        )
        for place in places[:MOST_LINES]
    ]


OTHER_DRAWS = Hypothesis(
    name="dropout_differs_from_reference",
    sentence="The forward pass draws random numbers (dropout, noise), and draws others for a shard "
    "than for the big batch. This is a property of the model or loss, not a fault of the "
    "reduction.",
    look_at="what draws: turn dropout off while gradients are compared (model.eval() or p=0), and "
    "make other random numbers a part of the batch",
    headline="a shard draws other random numbers",
    tell_apart="Let the forward pass draw nothing (eval mode): this difference then goes away.",
    held=_with_other_masks,
    indication=_no_common_seed,
    lines=_lines_that_draw,
    mend="none is needed; compare with dropout turned off (model.eval() or p=0), or with these "
    "numbers as a part of the batch.",
    limits_must_catch=True,
)

SAME_DRAWS = Hypothesis(
    name="dropout_same_on_all_ranks",
    sentence="The step gives all ranks the same seed, so that every rank draws the same random "
    "numbers (dropout, noise): those of different examples are not independent.",
    look_at="torch.manual_seed on every rank: add the rank to the seed once the weights are built",
    headline="all ranks draw the same dropout masks",
    tell_apart="Gradients alone cannot decide: compare the states of the ranks' generators.",
    held=_with_the_same_masks,
    indication=_one_seed,
    lines=_lines_that_seed,
    mend="torch.manual_seed(seed + rank), after the weights are built alike on all ranks.",
)

CAUSES = (
    Hypothesis(
        name="batch_norm_local_statistics",
        sentence="Batch norm normalises with the statistics of each rank's shard or micro-batch. "
        "This is a property of the model, not a fault of the reduction.",
        look_at="the batch norm: use SyncBatchNorm, or a normalisation of each example by itself",
        headline="batch norm uses each part's own statistics",
        tell_apart="Put the model in eval mode: this difference then goes away.",
        held=_with_local_statistics,
        lines=lambda view: module_lines(
            view, BATCH_NORMS, "normalises over the examples of one rank or micro-batch"
        ),
        mend="none is needed; use SyncBatchNorm (on GPUs), or compare in eval mode.",
        limits_must_catch=True,
    ),
    OTHER_DRAWS,
    SAME_DRAWS,
    Hypothesis(
        name="contrastive_local_negatives",
        sentence="The loss compares examples with each other, and every rank compares only those "
        "of its own shard, so that an example has fewer negatives than in the big batch. This is a "
        "property of the loss, not a fault of the reduction.",
        look_at="the input of the loss: gather the outputs of all ranks, with their gradient "
        "(torch.distributed.nn.functional.all_gather)",
        headline="contrastive loss lacks other ranks' examples",
        tell_apart="Give each rank one example: it then has nothing to compare with and no "
        "gradient.",
        held=_coupled("contrastive_local_negatives", also_unknown=True),
        lines=lambda view: loss_lines(view, COMPARISONS, "compares the examples of one rank"),
        mend="none is needed; compare all ranks' outputs, gathered with their gradient.",
    ),
    Hypothesis(
        name="tied_weights_parted",
        sentence="A weight that the model has in several places is a weight of its own in each of "
        "them in the step: its gradient lacks what the other places give.",
        look_at="to_empty after the meta device, copies of modules, and load_state_dict: tie the "
        "weights again afterwards",
        headline="tied weights are tied no more",
        tell_apart="Tie no weights in the case: this difference then goes away.",
        held=lambda view: on_every_rank(view, *_of_first_places(view)),
        lines=_lines_that_untie,
        mend=lambda view: (
            f"tie {names_text(sorted(view.measured.differing))} again after the model is built, "
            "before it is sharded."
        ),
    ),
    Hypothesis(
        name="batch_statistics_local",
        sentence="The loss has a term on statistics of the batch (variance, covariance), and every "
        "rank computes them from its own shard. This is a property of the loss, not a fault of the "
        "reduction.",
        look_at="the loss: gather the outputs of all ranks, with their gradient, before it takes "
        "statistics",
        headline="batch statistics are of each rank alone",
        tell_apart="Leave that term out of the loss: this difference then goes away.",
        held=_coupled("batch_statistics_local"),
        lines=lambda view: loss_lines(view, STATISTICS, "statistics of one rank's examples"),
        mend="none is needed; take statistics of all ranks' outputs, gathered with their gradient.",
    ),
    Hypothesis(
        name=STATISTIC,
        sentence="The loss takes a statistic of its batch that is no mean over examples (a root of "
        "a mean, a logarithm), and every rank takes it of its own shard. This is a property of the "
        "loss, not a fault of the reduction.",
        look_at="the loss: reduce the mean inside the root or logarithm over all ranks, with its "
        "gradient",
        headline="the loss takes a statistic per rank",
        tell_apart="Use the mean inside the statistic as the loss: this difference then goes away.",
        held=lambda view: on_every_rank(view, *_of_a_statistic(view)),
        indication=_why_no_mean,
        lines=lambda view: last_of(
            view.observed.calls.backwards, "of the statistic of this rank's part"
        ),
        mend="gather what the statistic is taken of from all ranks, with its gradient, or average "
        "the mean inside it.",
    ),
    Hypothesis(
        name="buffers_differ_between_ranks",
        sentence="Buffers of the model (running statistics, moving averages) differ between the "
        "ranks, and the forward pass reads them, so that gradients of different functions were "
        "averaged.",
        look_at="the lines that change a buffer: reduce what they write over all ranks, or let "
        "DistributedDataParallel broadcast the buffers before each forward pass",
        headline="ranks read different buffers",
        tell_apart="Gradients alone cannot decide: compare the buffers before the forward pass.",
        held=_with_own_buffers,
        indication=_other_buffers,
        lines=_lines_of_buffers,
        mend=lambda view: (
            f"reduce {names_text(buffers_apart(view))} over all ranks after each change, or "
            "broadcast from rank 0."
        ),
    ),
)
