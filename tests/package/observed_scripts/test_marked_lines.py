"""The line that a report marks where a script is wrong before its model is called, or in a line
between the model and its loss.
"""

from __future__ import annotations

import pytest

from ddp_equivalence.observed_scripts.analysis_of_script import MARKED
from tests.package.observed_scripts.observing import observed, source_of_fault


@pytest.mark.parametrize(
    ("word", "cause", "line"),
    [
        ("standardised_rows", "statistic_not_additive", "inputs = inputs / inp"),
        ("group_of_one", "reduced_in_wrong_group", "else DistributedDataParallel("),
        ("second", "backward_after_reduction", "output.abs().mean().backward()"),
        ("penalty", "backward_after_reduction", "sum(0.01 * weight.square()"),
        ("clamped", "clipped_before_reduce", "weight.register_hook("),
        ("clamped_on_ranks", "clipped_before_reduce", "weight.register_hook("),
        ("left_out", "parameter_frozen_on_one_rank", "optimizer = torch.optim"),
        ("centred", "buffers_differ_between_ranks", "self.centre = inputs"),
        ("teacher", "weights_differ_between_ranks", "teacher.load_state_dict("),
    ],
)
def test_the_line_that_is_wrong_is_marked(word: str, cause: str, line: str) -> None:
    found = observed("classifier.py", word, steps=2)
    assert (found.outcome, found.cause) == ("different", cause)
    assert source_of_fault(found).startswith(line)
    steps = "1 same; 2 different" if word == "centred" else "1, 2 different"
    assert f"  Steps: {steps}\n" in str(found)  # the centres are equal before the first step


def test_a_line_that_calls_the_model_may_be_the_one_that_is_wrong() -> None:
    """The ranks are watched from the call of the model on, in the middle of this line."""
    found = observed("class_weights.py", steps=1)
    assert (found.outcome, found.cause) == ("different", "token_counts_weighted_equally")
    assert source_of_fault(found) == "loss = criterion(model(inputs), labels)"
    assert "weights (1 : 4) of the classes 0, 1 in entry 1 of the batch" in str(found)


def test_what_is_clipped_before_the_reduction_is_right_if_no_rank_reaches_the_limit() -> None:
    assert observed("classifier.py", "reduced_last", "loosely", steps=2).outcome == "same"


def test_what_is_clipped_before_the_reduction_explains_every_element() -> None:
    found = observed("classifier.py", "reduced_last", steps=1)
    assert (found.outcome, found.cause) == ("different", "clipped_before_reduce")
    assert source_of_fault(found).startswith("nn.utils.clip_grad_norm_(")
    assert "Explains every element." in str(found)


def test_groups_are_seen_where_cuda_devices_are_the_cpu() -> None:
    found = observed("classifier.py", "group_of_one", steps=1, as_cpu=2)
    assert (found.outcome, found.cause) == ("different", "reduced_in_wrong_group")
    assert "in groups {0} and {1}" in str(found)


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("group_of_one", "reduced_in_wrong_group"),
        ("teacher", "weights_differ_between_ranks"),
    ],
)
def test_a_script_may_change_gradients_by_hand(word: str, cause: str) -> None:
    found = observed("classifier.py", word, "by_hand", steps=1)
    assert (found.outcome, found.cause) == ("different", cause)


def test_without_a_cause_the_line_is_marked_at_which_the_ranks_part_from_one_process() -> None:
    found = observed("classifier.py", "by_number", steps=2)
    assert (found.outcome, found.cause) == ("different", None)
    assert "in multiples of what their rows give: rank 0 1, rank 1 0.5." in str(found)
    assert "On one rank" not in str(found)  # one process is what the ranks are compared with
    line, *_ = [one for one in str(found).splitlines() if one.startswith("> ")]
    assert line.endswith("loss = loss / (1 + dist.get_rank())")
    full = found.full_report()
    assert full.count("different: classifier.py") == 1
    assert "step 1 of 2 (AdamW) is not what one process computes: no known cause fits" in full
    assert full.count("Only the first step that differs is explained.") == 1


def test_a_line_that_computes_otherwise_on_one_rank_is_marked_and_said_to_be() -> None:
    found = observed("classifier.py", "shifted", steps=1)
    assert (found.outcome, found.cause) == ("different", None)
    assert MARKED in str(found)
    assert source_of_fault(found).startswith("output = output + dist.get_rank()")
