"""A thing that is not as it was, and how much it matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["red", "yellow", "information", "ignored"]
LEVELS: tuple[Level, ...] = ("red", "yellow", "information", "ignored")


@dataclass(frozen=True)
class Kind:
    """A kind of finding. ``level``: the one that it has unless a policy says otherwise.
    ``meaning``: a sentence for those who read it for the first time.
    """

    level: Level
    meaning: str


KINDS: Mapping[str, Kind] = {
    "verdict_worse": Kind("red", "A check that was right is not, or cannot be judged any more."),
    "test_failed": Kind("red", "A test that passed fails."),
    "stopped_running": Kind("red", "A test that ran is skipped: nothing is known of it now."),
    "vanished": Kind("red", "A test or a check is not there any more."),
    "expected_otherwise": Kind("red", "The test of a check asks for another outcome than before."),
    "compared_less": Kind("red", "A check compares less than before, or something else."),
    "lane_changed": Kind("red", "A check ran on another backend or kind of device."),
    "incomplete": Kind("red", "A run was cut off, so that the rest of it is not known."),
    "nothing_compared": Kind("red", "A run compared nothing."),
    "error_grew": Kind("red", "An error is within its limit, and was much smaller before."),
    "limit_grew": Kind("red", "A check allows much more error than before."),
    "default_changed": Kind("red", "Scripts that do not set this default train otherwise now."),
    "slower": Kind("red", "A test needs much more processor time, beside what the others need."),
    "appeared_failing": Kind("yellow", "A test or a check is new, and is not right."),
    "failure_changed": Kind("yellow", "A test still does not pass, for another reason."),
    "other_checks": Kind("yellow", "The two records are not of the same checks."),
    "cause_changed": Kind("yellow", "What was different still is, with another cause."),
    "waits_longer": Kind("yellow", "A test takes much longer without working more: it waits."),
    "total_slower": Kind("yellow", "The whole run takes longer."),
    "memory_grew": Kind("yellow", "The largest process needs more memory."),
    "variable_changed": Kind("yellow", "A variable of NCCL, CUDA or torch is another one."),
    "exception_expired": Kind("yellow", "An exception of the policy does not count any more."),
    "verdict_better": Kind("information", "What was wrong is right."),
    "test_passes": Kind("information", "A test that failed or was skipped passes."),
    "appeared": Kind("information", "A test or a check is new."),
    "default_new": Kind("information", "A default is there that was not, or the other way round."),
    "digest_changed": Kind("information", "Gradients differ in their last digits, and are right."),
    "machine_changed": Kind("information", "Another machine may round otherwise."),
    "package_changed": Kind("information", "A package has another version."),
}
"""All kinds by name, the worst first."""


@dataclass(frozen=True)
class Seen:
    """A finding before it is judged. ``of``: the test, check, default or package. ``text``: what
    has changed, and by how much.
    """

    kind: str
    of: str
    text: str


@dataclass(frozen=True)
class Finding:
    """``decided_by``: the line of the policy, or the default level of its kind."""

    seen: Seen
    level: Level
    decided_by: str
