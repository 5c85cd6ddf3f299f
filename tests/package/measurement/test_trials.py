"""Edits are tried in turn on ranks. Whatever one of them does, the next ones are judged rightly."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.view import expected_of
from ddp_equivalence.measurement.edited_code import EditedCode
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.request import read_request
from ddp_equivalence.measurement.trials import RIGHT_AS_IT_IS, Tried, try_edits
from ddp_equivalence.ranks import process_tree
from tests.package.own_cases import loss, own_case

NOTHING = "at_first = 0"
FAULT = "divisor = 3"
REPAIRED = (FAULT, "divisor = rank.world_size")

Step = Callable[[nn.Module, Any, Rank], None]


def step(model: nn.Module, shard: Any, rank: Rank) -> None:
    at_first = 0
    divisor = 3
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, torch.Tensor)  # edits know only names that are used here
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= divisor + at_first


def doing(code: str) -> tuple[str, str]:
    """Something that the step does first, and that is no repair."""
    return NOTHING, f"{NOTHING}; {code}"


def edited(step: Step, before: str, after: str) -> EditedCode:
    """The step with other code. One that stands in a test is indented as if it stood alone."""
    lines, first = inspect.getsourcelines(step)
    source = "".join(lines)
    assert source.count(before) == 1
    one, other = (ast.parse(textwrap.dedent(s)) for s in (source, source.replace(before, after)))
    for tree in (one, other):
        ast.increment_lineno(tree, first - 1)
    return EditedCode(step.__code__.co_filename, one, other)


def tried(
    changes: Sequence[tuple[str, str]], step: Step = step, seconds: float = 30.0, **case: Any
) -> Tried:
    """What is found if these changes of the step are tried in turn."""
    request = read_request(own_case(**case), step, {"backend": "gloo"})

    def propose(seen: LocalsSeen) -> list[EditedCode]:
        return [edited(step, *change) for change in changes]

    return try_edits(
        request, expected_of(request), propose, lambda _: True, seconds, lambda _: None
    )


MISBEHAVIOUR = {
    "a collective on one rank only": "rank.rank == 0 and dist.all_reduce(torch.ones(1))",
    "other collectives on each rank": (
        "(dist.broadcast(torch.ones(2), 0) if rank.rank else dist.all_reduce(torch.ones(9)))"
    ),
    "os._exit on one rank": "import os; rank.rank or os._exit(1)",
    "never ends": "any(iter(int, 1))",
    "leaves a thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    "prints a lot": "print('word ' * 100_000)",
    "leaves a collective running": "rank.rank or dist.all_reduce(torch.ones(1), async_op=True)",
}


@pytest.mark.parametrize("code", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
def test_the_edits_after_one_that_misbehaves_are_judged_rightly(code: str) -> None:
    found = tried([doing(code), (FAULT, "divisor = 5"), REPAIRED, (FAULT, "divisor = 7")])
    assert found == Tried(right=(2,), count=4, of=4)


def unreduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()
        time.sleep(0)


def test_an_edit_that_waits_for_nothing_is_none_even_if_it_is_right_by_chance() -> None:
    late = "dist.all_reduce(parameter.grad, async_op=True); time.sleep(0.05)"
    in_time = "dist.all_reduce(parameter.grad)"
    found = tried([("time.sleep(0)", late), ("time.sleep(0)", in_time)], unreduced)
    assert found == Tried(right=(1,), count=2, of=2)


def test_an_edit_that_cannot_be_made_or_repairs_one_rank_only_is_none() -> None:
    on_one_rank = (FAULT, "divisor = rank.world_size + rank.rank")
    found = tried([("rank: Rank)", "rank: Rank = None)"), on_one_rank, REPAIRED])
    assert found == Tried(right=(2,), count=2, of=3)


def test_edits_are_tried_for_so_many_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried([REPAIRED]).count == 1  # the server that starts ranks has started
    monkeypatch.setattr("ddp_equivalence.measurement.trials.TIMES_THE_STEP", 0.0)
    for seconds in (2.0, 8.0, 30.0):
        began = time.monotonic()
        found = tried([doing("time.sleep(1000)")] * 1000, seconds=seconds)
        took = time.monotonic() - began
        if found.count:  # on a busy machine it may take seconds to start the ranks
            break
    assert 0 < found.count < found.of
    assert found.of == 1000
    assert took < seconds + 16  # it ends at once; starting ranks may take a while


def slow(model: nn.Module, shard: Any, rank: Rank) -> None:
    at_first = 0
    time.sleep(0.5 + at_first)


def test_an_edit_that_the_end_of_the_time_cuts_short_does_not_count() -> None:
    found = tried([("0.5 +", "60 +")], slow, seconds=2.0)
    assert found == Tried(count=0, of=1)


def never_ending(model: nn.Module, shard: Any, rank: Rank) -> None:
    time.sleep(1000)


def test_a_step_that_fails_as_it_is_says_why_in_one_line() -> None:
    found = tried([("1000", "0")], never_ending, seconds=2.0)
    assert found.count == 0
    assert found.why_not
    assert "\n" not in found.why_not


def test_no_edit_of_a_step_that_writes_a_file_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"

    def writing(model: nn.Module, shard: Any, rank: Rank) -> None:
        try:
            path.write_text("written")
        except Exception:
            print("no log")

    found = tried([("written", "other")], writing)
    assert found.count == 0
    assert found.why_not == f"open {str(path)!r} for writing"
    assert not path.exists()


def test_an_edit_that_writes_a_file_is_no_repair_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    save = f"; torch.save(model.state_dict(), {str(path)!r})"
    both = (FAULT, f"divisor = rank.world_size{save}")
    assert tried([both, REPAIRED]) == Tried(right=(1,), count=2, of=2)
    assert not path.exists()


def wrong_at_first(model: nn.Module, shard: Any, rank: Rank) -> None:
    at_first = 0
    kept = vars(dist)  # what is written to a module of torch stays in the process
    kept["runs"] = kept.get("runs", at_first) + 1
    divisor = 3 if kept["runs"] == 1 else rank.world_size
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


def test_an_edit_that_is_right_because_others_ran_before_it_is_none() -> None:
    found = tried([(NOTHING, "at_first = 1"), (NOTHING, "at_first = False")], wrong_at_first)
    assert found == Tried(count=1, of=2)  # the second edit, on new ranks


def test_no_edit_of_a_step_that_is_right_as_it_is_is_tried() -> None:
    found = tried([(FAULT, "divisor = 5")], repaired)
    assert found == Tried(why_not=RIGHT_AS_IT_IS)


def repaired(model: nn.Module, shard: Any, rank: Rank) -> None:
    divisor = 3
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor - 1


def test_no_process_is_left() -> None:
    before = set(process_tree.descendants(os.getpid()))
    tried([doing("import os; os.fork() or __import__('time').sleep(600)"), REPAIRED])
    assert set(process_tree.descendants(os.getpid())) <= before


def test_after_a_right_edit_so_many_more_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_equivalence.measurement.trials.AFTER_THE_FIRST", 2)
    wrong = (FAULT, "divisor = 5")
    found = tried([wrong, REPAIRED, wrong, REPAIRED, wrong, wrong])
    assert found == Tried(right=(1, 3), count=4, of=6)


def doubled(model: nn.Module, shard: Any, rank: Rank) -> None:
    divisor = 3
    (2 * loss(model, shard) / divisor).backward()


def test_an_edit_on_one_rank_is_tried() -> None:
    found = tried([(FAULT, "divisor = 1"), (FAULT, "divisor = 2")], doubled, layout="1x1")
    assert found == Tried(right=(1,), count=2, of=2)


@pytest.mark.parametrize("case", [{"dtype": torch.float32}, {"layout": "2x2"}], ids=str)
def test_a_repair_is_found_on_other_cases(case: dict[str, Any]) -> None:
    assert tried([REPAIRED], **case).right == (0,)
