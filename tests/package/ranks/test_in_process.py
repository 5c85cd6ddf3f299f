"""With rank 0 in the process of the test a debugger works in the step; the verdict is the same."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import BadCase, Rank, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import InProcessRankSet, RankSet
from tests.package.own_cases import loss, make_batch, own_case, right_step
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run

HERE = os.getpid()


def prints(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(rank.rank, rank.world_size, os.environ["RANK"], os.getpid())
    right_step(model, shard, rank)


def wrong_on_all(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= rank.world_size


@pytest.fixture(autouse=True)
def group_is_left_afterwards() -> Any:
    yield
    from ddp_equivalence.ranks.warm_ranks import warm_ranks

    warm_ranks().stop()
    assert not dist.distributed_c10d._world.pg_map
    assert "RANK" not in os.environ


@pytest.mark.parametrize("layout", ["1x1", "1x2"])
def test_rank_0_is_this_process_and_the_others_are_not(
    layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = own_case(layout=layout)
    world_size = str(case.ranks.world_size)
    for _ in range(2):
        verdict = check(case, prints, in_process=True)
        assert verdict.outcome == "same"
        assert capfd.readouterr().out.split() == ["0", world_size, "0", str(HERE)]
        others = [text.split() for rank, text in verdict.output.items() if rank > 0]
        assert [text[0] for text in others] == [str(r) for r in range(1, int(world_size))]
        assert str(HERE) not in [text[3] for text in others]


def test_a_difference_is_named_with_rank_0_in_process_too() -> None:
    assert check(own_case(), wrong_on_all, in_process=True).cause == "sum_not_mean"


def test_an_exception_of_rank_0_is_raised_unchanged() -> None:
    def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
        raise KeyError("colour")

    with pytest.raises(KeyError, match="colour"):
        check(own_case(), raises, in_process=True)
    assert check(own_case(), right_step, in_process=True).outcome == "same"
    assert check(own_case(), right_step).outcome == "same"


def test_a_fork_does_not_wait_for_the_threads_of_a_group_that_was_ended() -> None:
    """A worker of a DataLoader is such a fork."""
    assert check(own_case(), right_step, in_process=True).outcome == "same"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        dist.destroy_process_group()  # of all groups, also of those that wait for more work
    fork = multiprocessing.get_context("fork").Process(target=int)
    fork.start()
    fork.join(20)
    ended = fork.exitcode
    fork.kill()
    fork.join()
    assert ended == 0


STOPS = """
def stops(model, rows, rank):
    place = "rank " + str(rank.rank) + " of " + str(rank.world_size)
    if rank.rank == 0:
        breakpoint()
    step(model, rows, rank)

def test_stops(equivalence):
    assert equivalence.check(CASE, stops).outcome == "same"
"""


def test_breakpoint_stops_in_the_step(tmp_path: Path) -> None:
    (tmp_path / "test_stops.py").write_text(THEIR_TEST + STOPS)
    arguments = ("--in-process", "--ddp-deadline=2", "-k", "test_stops")
    code, text = run(tmp_path, *arguments, typed="p place\nc\n")
    assert code == 0, text
    assert "'rank 0 of 2'" in text
    assert "step(model, rows, rank)" in text


def test_in_process_is_refused_with_xdist_whose_workers_have_no_terminal(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--in-process", "-n", "2")
    assert code == 4
    assert "--in-process should be left out with -n" in text


@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_rank_0_leaves_a_group_of_nccl_without_a_call_that_waits_for_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    ranks = InProcessRankSet(parse("1x2"), Lane("gloo", "gloo", "cpu"), 30.0)
    ranks.start()
    ranks.lane = Lane(name, name, "cpu")
    for function in ("_abort_process_group", "destroy_process_group"):
        note_and_call(monkeypatch, dist.distributed_c10d, function, events)
    monkeypatch.setattr(dist, "destroy_process_group", dist.distributed_c10d.destroy_process_group)
    note_and_call(monkeypatch, RankSet, "stop", events)
    ranks.stop()
    expected = {
        "gloo": ["stop", "destroy_process_group"],
        "nccl": ["stop", "_abort_process_group"],
    }
    assert events == expected[name]


def note_and_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, events: Any) -> None:
    """Note that the function was called, and call it."""
    function = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        events.append(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, noted)


def only_in_one_process(model: nn.Module, batch: Any) -> Any:
    """Stands for a loss that all-reduces wherever there is a group; the step does not call it."""
    assert not dist.is_initialized(), "the big batch is computed in one process"
    return loss(model, batch)


@pytest.mark.parametrize("in_process", [True, False])
def test_the_big_batch_knows_nothing_of_the_group_of_this_process(in_process: bool) -> None:
    assert check(own_case(), right_step, in_process=True).outcome == "same"
    verdict = check(own_case(loss=only_in_one_process), right_step, in_process=in_process)
    assert verdict.outcome == "same", str(verdict)


def never_together(generator: torch.Generator) -> Any:
    """A batch whose builder waits for other ranks. They are not here while this is built."""
    dist.barrier()
    return make_batch(generator)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_batch_that_waits_for_other_ranks_does_not_wait_for_ever(in_process: bool) -> None:
    assert check(own_case(), right_step, in_process=True).outcome == "same"
    with pytest.raises(BadCase, match="collectives belong in the step"):
        check(own_case(batch=never_together), right_step, in_process=in_process)


def reduces_in_a_new_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    dist.all_reduce(torch.ones(1), group=dist.new_group())


def test_a_group_that_the_user_starts_and_ends_in_between_harms_no_check() -> None:
    assert check(own_case(), right_step, in_process=True).outcome == "same"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
    for step in (reduces_in_a_new_group, right_step):
        verdict = check(own_case(), step, in_process=True)
        assert verdict.outcome == "same", str(verdict)
