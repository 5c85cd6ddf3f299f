"""An explanation as plain sentences, with the numbers worked out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import chain

from ddp_equivalence.commands.explain.explanation import (
    SMALLEST_BETA,
    UNCHANGED,
    Epoch,
    Explanation,
    KnownGood,
    LearningRates,
    Setup,
    as_many,
    beta,
    divided_by,
    framework_divisor,
    number,
    of_g,
    starting_point,
    times,
    token_counts,
)
from ddp_equivalence.commands.explain.last_step import is_as_on_one_device, last_step_sentences
from ddp_equivalence.commands.explain.presets import (
    own_divisor,
    preset_sentences,
    scheduler_of_accelerate,
)
from ddp_equivalence.report.text import plural, wrapped


def explanation_text(explanation: Explanation) -> str:
    """The text of ``ddp-equivalence explain``, in lines of the run's width."""
    lines = [*wrapped(_headline(explanation), "", ""), ""]
    paragraphs = (
        ("Setup", chain(setup_sentences(explanation.setup), preset_sentences(explanation.setup))),
        ("Effective batch", batch_sentences(explanation)),
        ("Gradient", _gradient_sentences(explanation)),
        ("What to do", mend_sentences(explanation)),
        ("Learning rate", rate_sentences(explanation)),
        ("Optimizer", optimizer_sentences(explanation)),
        ("Epoch", epoch_sentences(explanation)),
    )
    for head, sentences in paragraphs:
        for position, sentence in enumerate(sentences):
            first_indent = f"  {head}: " if position == 0 else "      "
            lines += wrapped(sentence, "      ", first_indent)
    return "\n".join(lines) + "\n"


def _headline(explanation: Explanation) -> str:
    rates, epoch = explanation.learning_rates, explanation.epoch
    batch = f"Effective batch {explanation.effective_batch}"
    if epoch is not None and epoch.largest_step < explanation.effective_batch:
        batch += ", which no step of an epoch has"
    if rates is not None and rates.scaling != 1:
        batch += f", {as_many(rates.scaling)} the known one"
    if not explanation.is_multiple:
        return f'{batch}. The gradient is no multiple of the big batch\'s: see "What to do".'
    gradient = f"{batch}. The gradient is {gradient_in_words(explanation)}"
    if rates is None:
        return f"{gradient}."
    if rates.scaling == 1:
        return f"{gradient}; the learning rate is {number(rates.same_step)}."
    start = number(starting_point(explanation, rates).rate)
    return f"{gradient}; the learning rate to start with is {start}."


def gradient_in_words(explanation: Explanation) -> str:
    """``1/4 of the big batch's``, or of another loss that the known learning rate is for."""
    known, batch = explanation.setup.known_good, "the big batch's"
    if known is not None and known.loss == "sum" and not explanation.compares_sums:
        # The summed losses of two batches differ in size, so that of the known batch is named.
        batch = f"that of the summed loss with batch {known.batch}"
        factor = explanation.factor / known.factor
    else:
        factor = explanation.factor / explanation.unit
        if explanation.compares_sums and explanation.setup.loss != "sum":
            batch = "that of the big batch's summed loss"
    if factor == 1:
        return batch
    return f"{as_many(factor)} {batch}"


def _gradient_sentences(explanation: Explanation) -> Iterator[str]:
    setup, batch = explanation.setup, explanation.effective_batch
    factor = explanation.factor / explanation.unit
    over = "the one example" if batch == 1 else f"these {batch} examples, in one batch"
    tokens = "all tokens of " if setup.loss == "token-mean" else ""
    loss = "summed" if explanation.compares_sums else "mean"
    yield f"g is the gradient of the {loss} loss over {tokens}{over} on one device."
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        yield _for_which_losses(setup)
    divisions = "; ".join(divisor.what for divisor in explanation.divisors)
    yield f"{divisions[0].upper()}{divisions[1:]}."
    if setup.loss == "token-mean":
        yield from _token_sentences(explanation)
        return
    if not explanation.is_multiple:
        shares = " and ".join(
            f"{times(share)} in a replica with {size}"
            for size, share in dict.fromkeys(explanation.shares)
        )
        yield (
            f"So the gradient is no multiple of g: an example counts {shares}. In the big batch "
            "every example counts 1."
        )
        return
    together = batch / explanation.factor
    divisors = [one.number for one in explanation.divisors if one.number not in (1, None)]
    product = " x ".join(times(one) for one in divisors if one)
    product = f"{product} = " if len(divisors) > 1 else ""
    of_one = "sum does not divide" if explanation.compares_sums else f"mean divides by {batch}"
    yield f"Together this divides by {product}{times(together)}; the big batch's {of_one}."
    who = "every rank holds" if setup.processes > 1 else "the gradient is"
    whole = 1 if explanation.compares_sums else batch
    ratio = "" if factor == 1 or whole == 1 else f"{whole} / {times(together)} = "
    yield f"So {who} {ratio}{of_g(factor)}."
    if setup.known_good is not None and setup.loss != setup.known_good.loss:
        how = "adds up" if setup.loss == "sum" else "divides by"
        yield (
            "That is for a loss with one value per example, such as cross entropy. "
            f'nn.MSELoss(reduction="{setup.loss}") also {how} the elements of each example, so its '
            f"factor is {'larger' if setup.loss == 'sum' else 'smaller'} by their number."
        )


def _for_which_losses(setup: Setup) -> str:
    what = {
        "mean": "a mean over examples",
        "sum": "a sum over examples",
        "token-mean": "a mean over tokens of examples",
    }[setup.loss]
    return (
        f"This is for a loss that is {what} and takes each example on its own. It is not for batch "
        "norm, dropout, class weights (`weight=`) or contrastive losses."
    )


def _token_sentences(explanation: Explanation) -> Iterator[str]:
    setup, factor = explanation.setup, explanation.factor
    if explanation.is_multiple:
        who = "every rank holds" if setup.processes > 1 else "the gradient is"
        yield (
            f"One count is of all tokens of the step, as in the big batch. So {who} {of_g(factor)}."
        )
        return
    yield (
        "So the gradient is no multiple of g if the counts differ: each of the "
        f"{token_counts(setup)} means in a step weighs the same, however many tokens it has, and a "
        "token in a mean of few tokens counts more."
    )
    yield (
        f"On average over the tokens the gradient is {of_g(factor)}; if all counts are equal, it "
        "is exactly that."
    )


# The answer of ``ddp-equivalence explain`` in a few lines. ``--full`` says how it follows.

NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}

SEE_A_FACTOR = {
    "sgd": "weight_decay and clipping's max_norm",
    "adam": "weight_decay, clipping's max_norm and {eps}",
    "adamw": "clipping's max_norm and {eps}",
}
"""The settings that a factor on the gradient is compared with, by optimizer."""


def summary_text(explanation: Explanation) -> str:
    """The batch, the gradient, the learning rate, what goes with it, and the steps of an epoch."""
    lines: list[str] = []
    for sentence in (
        _batch_and_gradient(explanation),
        *_advice(explanation),
        *_epoch(explanation),
        _more(explanation.setup),
    ):
        lines += wrapped(sentence, "")
    return "\n".join(lines) + "\n"


def _batch_and_gradient(explanation: Explanation) -> str:
    setup, known = explanation.setup, explanation.setup.known_good
    factors = [str(setup.batch)]
    if setup.processes > 1:
        factors.append(f"{setup.processes} {'ranks' if setup.replicas == 1 else 'processes'}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    product = f" = {' x '.join(factors)}" if len(factors) > 1 else ""
    batch = f"Effective batch {explanation.effective_batch}{product}"
    if known is not None:
        same = known.batch == explanation.effective_batch
        batch += ", the known one" if same else f"; known: {known.batch}"
        if setup.loss == "sum" and known.loss == "mean":
            batch += " (mean loss; else --known-loss sum)"
    if explanation.is_multiple:
        only = ""
        if setup.like == "hf-trainer" and setup.tokens_over == "all-ranks":
            only = " (language model, transformers from 4.54 on)"
        return f"{batch}. The gradient is {gradient_in_words(explanation)}{only}."
    if setup.loss == "token-mean":
        return f"{batch}. The gradient is not the big batch's where counts of tokens differ."
    return f"{batch}. The gradient is no multiple of the big batch's."


def _advice(explanation: Explanation) -> Iterator[str]:
    """What to do about the gradient, the learning rate, and the settings beside it."""
    rates, setup = explanation.learning_rates, explanation.setup
    the, begin = "The", "With"
    if not explanation.is_multiple:
        yield f"To mend it, {' '.join(mend_sentences(explanation))}"
        the, begin = "With that change, the", "With that change and"
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    by = 1 if setup.is_adam else 1 / factor
    if rates is None:
        loss = "summed" if explanation.compares_sums else "mean"
        rate = "" if by == 1 else f", times {times(by)}"
        of = f"that of one device with a {loss} loss and this batch"
        yield f"{the} learning rate is {of}{rate}{_beside_a_factor(setup, factor)}."
        keep = "the learning rate of one device"
    elif rates.scaling == 1:
        rate = f"{the} learning rate is {number(rates.same_step)}"
        yield f"{rate}{_for_which_updates(explanation)}{_beside_a_factor(setup, factor)}."
        keep = number(rates.same_step / by)
    else:
        start = starting_point(explanation, rates)
        rate = f"{number(start.rate)} {start.how}"
        yield f"{begin} {NAMES[setup.optimizer]} start with {rate}: {start.why}. {start.others}"
        keep = number(start.rate / float(by))
        if factor != 1:
            beside = f"{start.beside}. " if setup.optimizer == "adamw" else ""
            yield f"{beside}{_factor_at_another_batch(setup, factor, keep)}"
        elif start.beside:
            yield start.beside_with_why
        return
    if factor != 1:
        take = "" if setup.is_adam else f" take {keep},"
        yield f"Or multiply the loss by {times(1 / factor)},{take} and change nothing else."


def _for_which_updates(explanation: Explanation) -> str:
    which = which_updates(explanation)
    if which is None:
        batch = explanation.effective_batch
        return f" for a step of {batch} different examples, and an epoch has none"
    return f": {which} then the same as on one device"


def _factor_at_another_batch(setup: Setup, factor: Fraction, keep: str) -> str:
    """Two ways to deal with a factor on the gradient. ``keep``: the learning rate without it."""
    see = SEE_A_FACTOR[setup.optimizer].format(eps="that eps")
    by, loss = times(factor), times(1 / factor)
    if setup.is_adam:
        return f"Multiply {see} by {by}, or the loss by {loss}: the factor cancels in all else."
    return (
        f"Keep momentum, and multiply {see} by {by}; or multiply the loss by {loss}, take {keep}, "
        "and change nothing else."
    )


def _beside_a_factor(setup: Setup, factor: Fraction) -> str:
    """What has to be multiplied for the same update, if it is used, where the gradient is not."""
    if factor == 1:
        return ""
    see = SEE_A_FACTOR[setup.optimizer].format(eps="eps")
    return f", if you also multiply {see} by {times(factor)}"


def _epoch(explanation: Explanation) -> Iterator[str]:
    """The steps of an epoch, and what a scheduler makes of them."""
    setup, epoch = explanation.setup, explanation.epoch
    if epoch is not None:
        steps = f"An epoch has {epoch.steps} {plural(epoch.steps, 'step')}"
        if epoch.rest:
            if_taken = "" if setup.like else ", if the loop takes it"
            steps += f" with the shorter last one{if_taken}"
        if epoch.largest_step < explanation.effective_batch:
            steps += f"; the largest is of {epoch.largest_step} examples"
            rates = explanation.learning_rates
            if rates is not None and rates.scaling != 1:
                steps += ", for which the rates are not meant"
        if epoch.repeated:
            examples = f"{epoch.repeated} {plural(epoch.repeated, 'example')}"
            steps += f"; it repeats {examples} at its end"
        if epoch.dropped:
            verb = plural(epoch.dropped, "example is", "examples are")
            steps += f"; {epoch.dropped} of {setup.examples} {verb} left out (drop_last)"
        if not is_as_on_one_device(explanation):
            steps += "; for its last gradient see --full"
        yield f"{steps}."
        if setup.like == "accelerate" and setup.processes > 1:
            yield scheduler_of_accelerate(setup.processes)


def _more(setup: Setup) -> str:
    only = ""
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        only = "Not exact with batch norm, dropout, class weights or contrastive losses. "
    return f"{only}More: --full."


# A setup in words: who trains, and on how many examples a step.


def setup_sentences(setup: Setup) -> Iterator[str]:
    """Sentences on the parallelism, and on how a process's batch is dealt to its replicas."""
    processes, gpus = setup.processes, setup.ranks_per_node
    nodes = f"{setup.nodes} {plural(setup.nodes, 'node')}"
    ranks = f"{processes} {plural(processes, 'rank')} on {nodes}"
    replicas = f"{gpus} {plural(gpus, 'replica')}"
    yield {
        "ddp": f"DistributedDataParallel, {ranks}.",
        "all-reduce-sum": f"your own all_reduce, which sums gradients; {ranks}.",
        "data-parallel": f"nn.DataParallel, one process with {replicas}; one loss over the "
        "gathered outputs.",
        "data-parallel-loss-inside": f"nn.DataParallel, one process with {replicas}; each has a "
        "loss of its own, and you take the mean of these.",
        "hybrid": f"{nodes} with one process each; DataParallel inside a process ({replicas}, one "
        "loss over the gathered outputs), DDP's average between the processes.",
        "none": "one process on one device.",
    }[setup.parallelism]
    if setup.replicas == 1:
        return
    sizes = setup.replica_sizes
    each = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]} each"
    split = f"{len(sizes)} {plural(len(sizes), 'replica')}: {each}"
    yield f"The batch of {setup.batch} is per process, and is split over {split}."
    idle = setup.replicas - len(sizes)
    if idle:
        verb = "idles" if idle == 1 else "idle"
        yield (
            f"{idle} {plural(idle, 'replica')} {verb}: DataParallel deals {sizes[0]} to each until "
            "nothing is left."
        )


def batch_sentences(explanation: Explanation) -> Iterator[str]:
    """The effective batch as a product."""
    setup = explanation.setup
    factors = [f"{setup.batch} {plural(setup.batch, 'example')}"]
    if setup.processes > 1:
        who = "processes" if setup.parallelism == "hybrid" else "ranks"
        factors.append(f"{setup.processes} {who}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    if len(factors) == 1:
        yield f"{factors[0]} a step."
    else:
        yield f"{' x '.join(factors)} = {explanation.effective_batch} a step."


# Sentences on how to mend unequal counts, and on the optimizer's settings that must change if the
# gradient has a factor.


def mend_sentences(explanation: Explanation) -> Iterator[str]:
    """Says how to turn a gradient that is no multiple of g into a multiple of g."""
    setup = explanation.setup
    if explanation.is_multiple:
        return
    mended = explanation.mended_factor / explanation.unit
    if setup.loss != "token-mean":
        yield (
            f"make the batch a multiple of {setup.replicas}, or take one loss over the gathered "
            f"outputs (data-parallel). Either gives {of_g(mended)}."
        )
        yield (
            f"A multiple of {setup.replicas} also changes the effective batch, so run explain "
            "again with that batch."
        )
        return
    if setup.like == "hf-trainer":
        yield from _for_hf_trainer(setup)
        return
    of = f"all {setup.accumulation} micro-batches" if setup.accumulation > 1 else "the batch"
    reduced = ", and all_reduce the count (sum)" if setup.processes > 1 else ""
    yield f"count the tokens of {of} before the first backward{reduced}; call it T."
    multiply = " and multiply" if setup.loss_times != UNCHANGED else ""
    only = f"divide{multiply} by nothing else"
    if own_divisor(setup) > 1:
        only += f" (the trainer itself divides by {own_divisor(setup)})"
    loss = _mended_loss(setup)
    yield f"Then take {loss}, and {only}. That gives g, the big batch's gradient."


def _for_hf_trainer(setup: Setup) -> Iterator[str]:
    beside = ", and do not multiply the loss" if setup.loss_times != UNCHANGED else ""
    if setup.tokens_over == "micro-batch":
        yield (
            "take transformers 4.54 or later, and a model whose loss takes num_items_in_batch: the "
            f"Trainer then counts the tokens of all micro-batches and ranks{beside}."
        )
    else:
        yield (
            "set average_tokens_across_devices=True (in transformers from 4.46.2 on; older ones "
            f"cannot){beside}."
        )
    yield "That gives g, the big batch's gradient."


def _mended_loss(setup: Setup) -> str:
    if setup.parallelism == "data-parallel-loss-inside":
        return 'the sum of the replicas\' losses, with reduction="sum", / T'
    divided = framework_divisor(setup), own_divisor(setup)
    by = " ".join([*(f"x {number}" for number in divided if number > 1), "/ T"])
    return f'the loss with reduction="sum" {by}'


def optimizer_sentences(explanation: Explanation) -> Iterator[str]:
    """Says which other settings must change if the gradient has a factor; says nothing if not."""
    rates, adam = explanation.learning_rates, explanation.setup.is_adam
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    if not explanation.is_multiple and adam:
        yield "Adam cancels a factor on the gradient, but it does not mend unequal counts."
    if factor == 1:
        return
    if adam:
        eps = f"Multiply eps by {times(factor)},"
        if rates is not None and rates.names_eps:
            assert rates.adam is not None
            new_eps = number(rates.adam.eps * factor)
            eps = f"Multiply the eps above by {times(factor)}, which gives {new_eps},"
        yield (
            f"Adam divides the gradient by its own size, so the factor {times(factor)} cancels, "
            f"except in the comparison with eps. {eps} and the factor cancels completely."
        )
        decay = f"Adam adds weight_decay to the gradient: multiply weight_decay by {times(factor)}."
        if explanation.setup.optimizer == "adamw":
            decay = "AdamW's weight_decay does not see the factor."
        yield f"{decay} Clipping sees the factor: multiply max_norm by {times(factor)}."
        keep = "keep all settings"
        if rates is not None and rates.scaling != 1:
            keep = "only change what is named with the learning rate above"
        yield f"Or multiply the loss by {times(1 / factor)} instead, and {keep}."
        return
    yield (
        f"if you change the learning rate and not the loss, multiply weight_decay by "
        f"{times(factor)} (SGD adds it to the gradient), and clipping's max_norm by "
        f"{times(factor)}. Momentum stays as it was."
    )


# Sentences on learning rates: what each of them keeps. The reader decides what matters.


def rate_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the learning rate.

    If none is known to be good, they say how to divide one that works on one device.
    """
    rates, known = explanation.learning_rates, explanation.setup.known_good
    if rates is None or known is None:
        yield from _without_known(explanation)
    elif rates.scaling == 1:
        yield from _at_the_same_batch(explanation, rates, known)
    else:
        yield from _at_another_batch(explanation, rates, known)


def _without_known(explanation: Explanation) -> Iterator[str]:
    factor = explanation.mended_factor / explanation.unit
    loss = "summed" if explanation.compares_sums else "mean"
    if explanation.setup.is_adam:
        change = ", unchanged, because Adam cancels a constant factor"
    else:
        change = ", unchanged" if factor == 1 else f", {_divided_in_words(factor)}"
    change += "" if explanation.is_multiple else ", with the change above"
    yield (
        f"the one that works on one device with a {loss} loss and batch "
        f"{explanation.effective_batch}{change}."
    )
    yield "If you know one that worked with any other batch, give it: --known-good BATCH@LR."


def _divided_in_words(factor: Fraction) -> str:
    return f"divided by {times(factor)}" if factor >= 1 else f"multiplied by {times(1 / factor)}"


def _at_the_same_batch(
    explanation: Explanation, rates: LearningRates, known: KnownGood
) -> Iterator[str]:
    was, now = number(known.learning_rate), number(rates.same_step)
    adam, ranks = explanation.setup.is_adam, explanation.setup.processes
    if not explanation.is_multiple:
        by = f"{was} {divided_by(rates.relative)} = " if rates.relative != 1 and not adam else ""
        yield (
            f"{by}{now} with that change, as on one device{_which(explanation)}. Without it, no "
            "learning rate trains the same."
        )
    elif adam:
        cancels = " Adam cancels the factor of the gradient." if rates.relative != 1 else ""
        yield f"{now}, as on one device{_which(explanation)}.{cancels}"
    elif rates.relative == 1:
        not_by = f"{ranks}, nor by the square root of {ranks}"
        more = f" Do not multiply it by {not_by}." if ranks > 1 else ""
        yield f"{now}, as on one device{_which(explanation)}.{more}"
    else:
        rate = f"{was} {divided_by(rates.relative)} = {now}"
        yield f"{rate}{_which(explanation, 'same as on one device')}."
        yield (
            f"Or multiply the loss by {times(1 / rates.relative)} and keep {was}; then weight "
            "decay and clipping stay as they were, too."
        )


def _which(explanation: Explanation, same: str = "same") -> str:
    which = which_updates(explanation)
    if which is None:
        return (
            f", for a step of {explanation.effective_batch} different examples (an epoch has none)"
        )
    return f": {which} the {same}"


def _at_another_batch(
    explanation: Explanation, rates: LearningRates, known: KnownGood
) -> Iterator[str]:
    loss = " and a summed loss" if known.loss == "sum" else ""
    yield (
        f"{number(known.learning_rate)} worked with batch {known.batch}{loss}; "
        f"{explanation.effective_batch} is {as_many(rates.scaling)} that. No learning rate trains "
        "exactly the same; each of these keeps one thing:"
    )
    if explanation.setup.is_adam:
        yield from _for_adam(rates)
    elif rates.relative != 1:
        why = _why_divided(explanation, known)
        yield f"({why}; each rate below includes the {divided_by(rates.relative)} for that.)"
    if not explanation.setup.is_adam:
        yield from _for_sgd(rates)
    start = starting_point(explanation, rates)
    yield start.as_sentence
    if not explanation.is_multiple:
        yield (
            "All of this holds with the change above. Without it, no learning rate keeps any of "
            "these exactly."
        )


def _why_divided(explanation: Explanation, known: KnownGood) -> str:
    after = "" if explanation.is_multiple else " with the change above"
    mine = f"Your gradient is {of_g(explanation.mended_factor)}{after}"
    if known.loss == "mean":
        return mine
    return f"{mine}, and that of the summed loss was {of_g(known.factor)}"


def _for_sgd(rates: LearningRates) -> Iterator[str]:
    k = times(rates.scaling)
    yield (
        f"{number(rates.same_step)} keeps the length of a step for the same mean gradient; an "
        f"epoch has {as_many(1 / rates.scaling)} the steps."
    )
    larger = rates.scaling > 1
    caveat = (
        " They find that linear scaling fails while the weights change fast, so they warm up to it "
        "in the first epochs. They also find that it fails beyond some batch size."
        if larger
        else ""
    )
    moves = f"one step moves as far as {k} steps did with the known batch"
    if not larger:
        moves = f"{times(1 / rates.scaling)} steps move as far as one did with the known batch"
    yield (
        f"{number(rates.linear)} (linear, x {k}) keeps the update per example: {moves}, if the "
        f"gradient hardly changes meanwhile. Goyal et al. 2017, arXiv 1706.02677, section "
        f"2.1.{caveat}"
    )
    yield (
        f"{number(rates.square_root)} (square root, x {_root(rates)}) keeps the variance of the "
        "update, which comes from drawing examples. Krizhevsky 2014, arXiv 1404.5997 (for whom "
        "linear scaling worked better); Hoffer et al. 2017, arXiv 1705.08741."
    )


def _for_adam(rates: LearningRates) -> Iterator[str]:
    assert rates.adam is not None
    yield (
        f"{number(rates.same_step)} keeps the length of a step if most of the gradient is noise "
        "with both batches, or hardly any of it is: Adam divides the gradient by its own size. An "
        f"epoch has {as_many(1 / rates.scaling)} the steps."
    )
    betas = ", ".join(map(beta, rates.adam.rule_betas))
    eps = f"eps {number(rates.adam.eps)} in place of 1e-8."
    settings = f"It needs betas ({betas}) in place of yours, and {eps}"
    if not rates.adam.in_reach:
        settings = (
            f"It needs {eps} Its betas would be ({betas}), but it is derived for betas that "
            f"average over many gradients. As one is below {times(SMALLEST_BETA)}, keep yours, "
            "with which the weights move and scatter as much over many steps."
        )
    yield (
        f"{number(rates.square_root)} (square root, x {_root(rates)}) keeps the path of the "
        f"weights and its noise if noise is most of the gradient. {settings} Malladi et al. 2022, "
        "arXiv 2205.10287."
    )
    far = "goes too far" if rates.scaling > 1 else "does not go far enough"
    yield (
        f"{number(rates.linear)} (linear, x {times(rates.scaling)}) keeps the distance per epoch "
        f"if the gradient is much larger than its noise; if noise dominates, it {far}."
    )


def _root(rates: LearningRates) -> str:
    return number(float(rates.scaling) ** 0.5)


# An epoch in words: its steps, its last step, and which examples are repeated or left out.


def epoch_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the steps of an epoch; none if the dataset's size was not given."""
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None:
        return
    if epoch.largest_step < explanation.effective_batch:
        too_small = f"No step has all {explanation.effective_batch} examples"
        rates, not_for = explanation.learning_rates, ""
        if rates is not None and rates.scaling != 1:
            not_for = " The learning rates above are not for such a step."
        yield f"{too_small}: the largest has {epoch.largest_step}.{not_for}"
    yield _batches(setup, epoch)
    if setup.accumulation > 1:
        yield from _window_sentences(setup, epoch)
    yield from last_step_sentences(explanation, epoch)
    if epoch.repeated:
        yield _repeated(setup, epoch)
    if epoch.dropped:
        verb = plural(epoch.dropped, "example is", "examples are")
        yield f"{epoch.dropped} {verb} left out (drop_last)."
    known = setup.known_good
    if known is not None and setup.examples is not None and known.batch != setup.effective_batch:
        whole, remainder = divmod(setup.examples, known.batch)
        then = whole + (remainder > 0 and not setup.drop_last)
        steps = f"{then} {plural(then, 'step')}"
        yield f"With the known batch of {known.batch} an epoch has {steps}."


def unlike_one_device(explanation: Explanation) -> int:
    """How many updates at the end of an epoch are not those of one device with the whole batch.

    They are more than one where more examples are repeated than the last step has. A shorter last
    step of whole batches is one that one device with drop_last does not take.
    """
    epoch = explanation.epoch
    if epoch is None or not epoch.repeated:
        not_taken = epoch is not None and explanation.setup.drop_last and epoch.rest > 0
        return int(not_taken or not is_as_on_one_device(explanation))
    before_the_last = max(0, epoch.repeated - epoch.last_step)
    return min(epoch.steps, 1 + -(-before_the_last // explanation.effective_batch))


def which_updates(explanation: Explanation) -> str | None:
    """``every update but an epoch's last is``: which are the same as on one device; None: none."""
    epoch, batch = explanation.epoch, explanation.effective_batch
    if epoch is None:
        return "every update is" if batch == 1 else f"every update of {batch} examples is"
    others = unlike_one_device(explanation)
    if not others:
        return "every update is"
    if others == epoch.steps:
        return None
    return f"every update but an epoch's last {'' if others == 1 else f'{others} '}is"


def _batches(setup: Setup, epoch: Epoch) -> str:
    dealt = "full batches" if setup.deals_full_batches else "DistributedSampler"
    whose = "" if setup.processes == 1 else f", {epoch.examples_each} a rank ({dealt})"
    what = f"{setup.examples} {plural(setup.examples or 0, 'example')}{whose}"
    short, alone = epoch.last_batch != setup.batch, epoch.micro_batches == 1
    last = f", the last of {epoch.last_batch}" if short else ""
    batches = f"{epoch.micro_batches} batches of {setup.batch}{last}"
    if alone:
        batches = f"1 batch, of {epoch.last_batch}"
    steps = ": 1 step" if alone else ", and as many steps"
    return f"{what}: {batches}{steps if setup.accumulation == 1 else ''}."


def _repeated(setup: Setup, epoch: Epoch) -> str:
    assert setup.examples is not None
    dealt = setup.processes * epoch.examples_each
    each = epoch.examples_each
    why = f"so that every rank gets the same number: {setup.processes} x {each} = {dealt}"
    if epoch.repeated <= setup.examples:
        verb = plural(epoch.repeated, "example is", "examples are")
        twice = plural(epoch.repeated, "It counts", "They count")
        which = "update is" if epoch.repeated <= epoch.last_step else "updates are"
        return (
            f"{epoch.repeated} {verb} repeated, {why}. {twice} twice, the second time at the end "
            f"of the epoch, so its last {which} not as on one process."
        )
    often, more = divmod(dealt, setup.examples)
    seen = f"{often} or {often + 1}" if more else str(often)
    return f"Every example is seen {seen} times, {why}."


def _window_sentences(setup: Setup, epoch: Epoch) -> Iterator[str]:
    rest, whole = epoch.rest, setup.accumulation
    full = f"{epoch.full_steps} {plural(epoch.full_steps, 'step')} of {whole} micro-batches"
    if not rest:
        yield f"{full}."
        return
    batches = f"{rest} {plural(rest, 'micro-batch', 'micro-batches')}"
    if setup.like is not None:
        yield f"{full}, and one of {rest}." if epoch.full_steps else f"1 step of {batches}."
    elif epoch.full_steps:
        yield (
            f"{full}, and one of {rest} if the loop steps at the end of an epoch. If it does not, "
            "clear the gradient there, or it is added to the next epoch's first step."
        )
    else:
        yield (
            f"1 step, of {batches}, if the loop steps at the end of an epoch; none if it does not."
        )
