"""Training scripts as they are: right ones are the same, and of wrong ones the line is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddp_equivalence import NotEquivalent
from tests.combinations import one_of_each
from tests.package.observed_scripts.observing import observed, outcomes, script, source_of_fault

LIMIT = 1e-13
"""The scripts compute in float64, so that right ones agree to a few eps."""

IN_PYTHON = ["attribute", "local", "random", "numpy", "of_numpy", "own", "inner", "lazy"]
"""Things that decide about a step and are in no weight, buffer or batch."""

OTHERWISE_NAMED = ("inner", "lazy")
"""These have further backward passes, which are named instead."""


RIGHT: list[Any] = [
    ("classifier.py", 3),  # sampler, loader, dropout
    ("language_model.py", 3),  # no loader, micro-batches divided among ranks
    ("adversarial.py", 4),  # two optimizers in turn, noise
    ("loss_scale.py", 3),  # loss scale, loader read ahead
    ("detector.py", 3),  # lists of images and boxes
    ("tagger.py", 3),  # rows sorted by length; a loss annealed by the step
    ("spawned.py", 1),  # a starting process asks how long a loader is
    ("classifier.py ahead noise", 2),  # a loader ahead of the noise
    ("classifier.py crops", 2),  # several entries of a row, dropped alone
    ("classifier.py probed", 2),  # a module that one rank calls alone
    ("classifier.py evaluates", 2),  # an evaluation of the same rows on a rank
    ("classifier.py reduced_last loosely", 2),  # clipped first, to no effect
    ("loss_scale.py by_hand", 2),  # a loss scale that is divided by hand
    ("detector.py named", 2),  # lists of rows in a named argument
    ("detector.py one", 2),  # one row with its boxes
    ("detector.py uncollated", 2),  # dicts that are not collated
    ("adversarial.py fixed", 4),  # as many rows made as are read
    ("adversarial.py fixed uniform", 4),  # as many rows made, uniformly
    # an encoder that is not trained gets the batch first
    *((f"encoded.py {word}", 3) for word in ("", "accumulating", "evaluating", "two_loaders")),
    ("encoded.py tail", 4),
    # state that is reduced, or follows the weights
    *((f"moving_state.py {word} reduced", 3) for word in ("codebook", "normalised", "teacher")),
    *((f"moving_state.py {word} reduced", 3) for word in ("late", "scheduled", "loss plain")),
    *((f"moving_state.py {word} plain reduced", 3) for word in ("centre", "teacher", "keeps")),
    *((f"parting.py {words}", 4) for words in ("plateau", "adam loaded on_all")),
    *((f"phases.py {word}", 4) for word in ("first_the_head", "two_models", "in_turns")),
    *((f"varying.py {word} dropout", 3) for word in IN_PYTHON),
    ("varying.py counted", 3),
    *((f"accumulating.py {word}", 2) for word in ("by_length", "by_length_before")),
]


@pytest.mark.parametrize(("command", "steps"), one_of_each(script, RIGHT))
def test_a_right_script_trains_as_in_one_process(command: str, steps: int) -> None:
    found = observed(*command.split(), steps=steps)
    assert outcomes(found) == ["same"] * steps, str(found)
    errors = [verdict.error for verdict in found.verdicts]
    assert all(error is not None and error < LIMIT for error in errors), errors
    assert found.assert_equivalent() is found
    many = f"{steps} steps" if steps > 1 else "1 step"
    assert str(found).startswith(
        f"same: {command.split()[0]}: {many} on 2 ranks as in one process\n"
    )


WRONG: list[Any] = [
    ("classifier.py unwrapped", "no_all_reduce", "loss.backward("),
    ("classifier.py raw", "raw_module_called", "output = net(inputs)"),
    ("classifier.py sum", "mean_not_sum", "loss = cross_entropy("),
    ("classifier.py times", "sum_not_mean", "loss = loss * dist.get_world_size()"),
    ("classifier.py same_rows", "every_rank_same_data", "loader = kind(data"),
    ("classifier.py weighed", "statistic_not_additive", "loss = loss + output"),
    ("classifier.py hook", "low_precision_reduce", "model.register_comm_hook("),
    ("classifier.py ignored", "token_counts_weighted_equally", "loss = cross_entropy("),
    ("classifier.py clip", "clipped_otherwise", "nn.utils.clip_grad_norm_("),
    ("classifier.py reduced_last", "clipped_before_reduce", "nn.utils.clip_grad_norm_("),
    ("classifier.py standardised_rows", "statistic_not_additive", "inputs = inputs / inp"),
    ("classifier.py group_of_one", "reduced_in_wrong_group", "else DistributedDataParallel("),
    ("classifier.py second", "backward_after_reduction", "output.abs().mean().backward()"),
    ("classifier.py penalty", "backward_after_reduction", "sum(0.01 * weight.square()"),
    ("classifier.py clamped", "clipped_before_reduce", "weight.register_hook("),
    ("classifier.py clamped_on_ranks", "clipped_before_reduce", "weight.register_hook("),
    ("classifier.py left_out", "parameter_frozen_on_one_rank", "optimizer = torch.optim"),
    ("classifier.py teacher", "weights_differ_between_ranks", "teacher.load_state_dict("),
    ("class_weights.py", "token_counts_weighted_equally", "loss = criterion(model(inputs), l"),
    ("detector.py sum", "mean_not_sum", "loss = losses.sum()"),
    ("detector.py counts", None, "loss = loss + losses.square().sum() / boxes"),
    ("language_model.py undivided", "accumulation_not_divided", "loss.backward()"),
    ("language_model.py uneven", "uneven_shards_weighted_equally", "loss = model("),
    ("loss_scale.py times", "sum_not_mean", "loss = loss * dist.get_world_size()"),
    ("loss_scale.py scaled", "clipped_while_scaled", "nn.utils.clip_grad_norm_("),
    *(
        (f"encoded.py wrong {word}", "raw_module_called", "head(code)")
        for word in ("", "accumulating", "evaluating", "two_loaders")
    ),
]


@pytest.mark.parametrize(("command", "cause", "line"), one_of_each(script, WRONG))
def test_a_script_that_is_wrong_in_every_step_is_different_and_its_line_is_named(
    command: str, cause: str | None, line: str
) -> None:
    found = observed(*command.split(), steps=2)
    assert (found.outcome, outcomes(found)) == ("different", ["different"] * 2), str(found)
    assert found.cause == cause or cause is None
    assert line in source_of_fault(found)
    with pytest.raises(NotEquivalent):
        found.assert_equivalent()


CODES = "self.codes.add_(moved, alpha=0.5)"
CENTRE = "self.codes[0] = 0.5 * centre + 0.5 * self.mean(values.detach())"
LOSS = "self.center = 0.5 * self.center + 0.5 * self.mean(values)"
OF_BIG_BATCH, BETWEEN_RANKS = "buffers_differ_from_big_batch", "buffers_differ_between_ranks"


LATER: list[Any] = [
    ("classifier.py centred", 1, 1, BETWEEN_RANKS, "self.centre = inputs"),
    ("classifier.py stale", 1, 1, "stale_gradient_added", "optimizer.zero_grad()"),
    ("moving_state.py codebook", 1, 2, OF_BIG_BATCH, CODES),
    ("moving_state.py centre", 1, 2, OF_BIG_BATCH, CENTRE),
    ("moving_state.py late", 1, 2, OF_BIG_BATCH, CODES),
    # DDP sends buffers from rank 0 to all ranks, and no other tensors.
    ("moving_state.py centre plain", 1, 2, BETWEEN_RANKS, CENTRE),
    ("moving_state.py late plain", 1, 2, BETWEEN_RANKS, CODES),
    ("moving_state.py loss plain", 1, 2, BETWEEN_RANKS, LOSS),
    ("phases.py first_the_head wrong", 2, 2, "raw_module_called", "second(model)"),
    ("phases.py two_models wrong", 2, 2, "raw_module_called", "second(model)"),
    ("phases.py in_turns wrong", 1, 3, "raw_module_called", "second(model)"),
]


@pytest.mark.parametrize(("command", "right", "wrong", "cause", "line"), one_of_each(script, LATER))
def test_steps_that_are_right_come_before_the_first_that_is_wrong(
    command: str, right: int, wrong: int, cause: str, line: str
) -> None:
    found = observed(*command.split(), steps=right + wrong)
    assert outcomes(found) == ["same"] * right + ["different"] * wrong, str(found)
    assert found.cause == cause, str(found)
    assert line in source_of_fault(found)


PARTING: list[Any] = [
    # a schedule by each rank's own loss
    (
        "plateau own",
        4,
        "until step 3, .* lr of group 0 is 0.1 on rank 0, 0.01 on rank 1",
        "scheduler.step(own)",
    ),
    # state that one rank has loaded
    (
        "adam loaded",
        2,
        "until step 1, .* step of 0.weight is 1 on rank 0, none on rank 1",
        "optimizer.load_state_dict(state)",
    ),
    # a rate that is set by rank
    (
        "by_hand",
        3,
        "until step 2, .* lr of group 0 is 0.1 on rank 0, 0.2 on rank 1",
        'group["lr"] *= 1 + rank',
    ),
    # an option that is given by rank
    (
        "decay",
        2,
        "until step 1, .* weight_decay of group 0 is 0 on rank 0, 0.1 on rank 1",
        "optimizer = SGD(",
    ),
    # state that one rank has cleared
    ("cleared", 3, "until step 2, .* momentum_buffer of 0.weight differs", "optimizer.step()"),
    # noise in the update
    (
        "noisy",
        2,
        "until step 1, in which the optimizers of the ranks make different updates",
        "optimizer.step()",
    ),
]


@pytest.mark.parametrize(
    ("words", "steps", "differs", "line"),
    one_of_each(lambda row: row[-1] == "optimizer.step()", PARTING),
)
def test_the_step_in_which_weights_part_is_named_with_what_differs(
    words: str, steps: int, differs: str, line: str
) -> None:
    """The gradients are right, and the optimizers of the ranks make other updates of them."""
    found = observed("parting.py", *words.split(), steps=steps)
    assert outcomes(found) == [*["same"] * (steps - 1), "different"], str(found)
    assert found.cause == "optimizers_differ_between_ranks"
    (finding, *_) = found.verdict.findings
    assert re.search(differs, finding.headline), finding.headline
    assert source_of_fault(found).startswith(line)


def test_an_optimizer_that_one_rank_leaves_out_is_different_with_both_lines() -> None:
    found = observed("encoded.py", "tail", "skipped", steps=4)
    assert outcomes(found)[:4] == ["same", "same", "unknown", "different"]
    assert (found.outcome, found.cause) == ("different", "optimizers_differ_between_ranks")
    (finding,) = found.verdict.findings
    assert "rank 0 steps with Linear#1.bias and 1 more" in finding.headline
    assert [one.note.partition(" ")[0] for one in finding.lines] == ["rank", "rank"]
    assert "of_tail.step()" in str(found)
    assert "of_head.step()" in str(found)


@pytest.mark.parametrize("words", one_of_each(bool, ["", "turns", "fixed", "fixed uniform"]))
def test_each_step_is_judged_with_one_of_the_same_optimizer(words: str) -> None:
    """Two optimizers step in turn, or after every other batch; the second one is wrong."""
    found = observed("adversarial.py", "double", *words.split(), steps=4)
    assert outcomes(found) == ["same", "different"] * 2, str(found)
    assert found.cause == "sum_not_mean"
    assert found.verdict.subject == "adversarial.py, step 2 of 4 (Adam)"


@pytest.mark.parametrize(("words", "outcome"), [("", "same"), ("wrong", "different")])
def test_the_second_phase_alone_can_be_observed(words: str, outcome: str) -> None:
    found = observed("phases.py", "first_the_head", *words.split(), from_step=2, steps=2)
    assert outcomes(found) == [outcome] * 2, str(found)


@pytest.mark.parametrize("word", one_of_each(OTHERWISE_NAMED.__contains__, IN_PYTHON))
def test_a_mistake_is_found_whatever_changes_from_step_to_step(word: str) -> None:
    found = observed("varying.py", word, "uneven")
    assert outcomes(found) == ["different"] * 3, str(found)
    if word not in OTHERWISE_NAMED:
        assert "rank 0 1, rank 1 1.1" in str(found), "each rank's rows were not computed alone"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("by_rank", "of_rank"),
        ("attribute own_mean", "mean_length"),
        ("own_average", "trainer.balance.average['output']"),
        ("own_last", "trainer.last[1]"),
    ],
)
def test_what_a_script_holds_in_python_is_named_where_it_differs(words: str, name: str) -> None:
    found = observed("varying.py", *words.split())
    wrong = [one for one in found.verdicts if one.outcome != "same"]
    assert {one.outcome for one in wrong} == {"unknown"}, str(found)
    assert f"{name} (" in wrong[0].reason.partition("in another state there: ")[2], str(found)


def test_a_penalty_on_every_rank_is_found_if_a_count_was_reduced_before_the_forward() -> None:
    found = observed("varying.py", "counted", "penalised")
    assert outcomes(found) == ["different"] * 3, str(found)
    marked = [line for line in str(found).splitlines() if line.startswith("> ")]
    assert ["loss = (fit + penalty) * dist.get_world_size()" in line for line in marked] == [True]
