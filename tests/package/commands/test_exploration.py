"""The suite judges random cases rightly; a search finds and shrinks what a step does wrong."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Rank
from ddp_equivalence.case import build
from ddp_equivalence.case.build import SubsetBuilder, with_examples
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.shards import split
from ddp_equivalence.commands import exploration
from ddp_equivalence.commands.exploration import (
    OWN_LAYOUTS,
    Judged,
    Search,
    Space,
    Variation,
    variations,
)
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.strategies import catalogue, trial
from tests.package.own_cases import EXAMPLES, make_batch, own_case, right_step

FILE = """
from tests.package.own_cases import own_case, right_step
from tests.package.commands.test_exploration import global_mean

case = own_case(layout="2x2")
"""


def global_mean(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    """Right for any shards."""
    count = torch.tensor(float(shard["targets"].numel()), dtype=torch.float64)
    dist.all_reduce(count)
    ddp = DistributedDataParallel(model)
    total = (ddp(shard["rows"]) - shard["targets"]).square().sum()
    (rank.world_size / count * total).backward()


def refuses_an_empty_shard(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    if not len(shard["rows"]):
        raise ValueError("nothing to train on")
    global_mean(model, shard, rank)


def explored(step: Any, wanted: int, **given: Any) -> Search[Variation]:
    return exploration.search_variations(UserCheck(own_case(layout="2x2"), step), given, wanted)


def drawn_of(step: Any, wanted: int, **options: Any) -> list[Variation]:
    given, fields = options.pop("given", {}), options.pop("fields", {})
    space = variations(UserCheck(own_case(**fields), step, options), given)
    drawn = list(space.draw(wanted, "0"))
    assert len(drawn) == wanted
    return drawn


def outcomes(search: Search[Any]) -> set[str]:
    return {judged.outcome for judged in search.judged.values()}


@pytest.fixture
def user_file(tmp_path: Path, forget_imports: None) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_random_right_cases_are_called_the_same_and_differences_by_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few enough to start their ranks in a moment.
    monkeypatch.setattr(exploration, "LAYOUTS", ("1x1", "1x2", "1x3", "2x1", "2+1"))
    search = exploration.search_suite(right=30, wrong=10, seed=5)
    assert [judged.repeat for judged in search.judged.values() if judged.wrong] == []
    by_outcome = [one.outcome for trial, one in search.judged.items() if trial.cause is None]
    assert by_outcome.count("same") >= 28
    known = [one.outcome for trial, one in search.judged.items() if trial.cause is not None]
    assert len(known) == 10
    assert set(known) == {"different"}
    assert {one.strategy for one in search.judged} == set(exploration.portable_strategies())
    start = "30 random right cases: 0 false alarms; 10 random known differences"
    assert exploration.closing_line(search).startswith(start)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def names(seed: int) -> list[str]:
        drawn = exploration.random_trials("ddp_mean", promised=True).draw(20, f"{seed}")
        return [f"{each} {each.case}" for each in drawn]

    before = names(1)
    assert len(set(before)) == len(before) == 20
    assert names(1) == before
    assert names(2) != before


def test_the_simplest_value_is_found_a_field_at_a_time() -> None:
    def judge(value: tuple[int, int]) -> Judged:
        return Judged("", "", "wrong" if max(value) >= 100 else "")

    space = Space((range(1000), range(1000)), lambda *value: value if value[1] > 3 else None)
    assert space.smallest((400, 700), judge, "wrong") == (0, 100)


def test_a_search_stops_after_a_few_cases_that_time_out_and_shows_the_smallest() -> None:
    def judge(value: tuple[int]) -> Judged:
        late = value[0] >= 5
        return Judged("failed", exploration.TIMED_OUT, "failed") if late else Judged("same", "")

    space = Space((range(20),), lambda value: (value,))
    search = Search[tuple[int]](lambda value: "1x2", judge)
    drawn = {(value,): (space, (value,)) for value in (1, 9, 8, 7, 6, 11)}
    search.try_all(drawn)
    assert list(search.judged) == [(1,), (9,), (8,), (7,)]
    assert "3 cases that timed out" in search.stopped
    assert [value for value, _ in search.smallest] == [(5,)]


def test_a_false_alarm_is_shrunk_to_its_smallest_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_cause", lambda trial: None)  # as if all were promised
    monkeypatch.setattr(exploration, "portable_strategies", lambda: ("manual_all_reduce_sum",))
    search = exploration.search_suite(right=6, wrong=0, seed=0)
    ((smallest, judged),) = search.smallest
    case = smallest.case
    assert case.ranks.world_size == 2
    assert case.catalogue_examples <= 4
    assert (case.shards, case.seed, case.dtype) == ("equal", 0, torch.float64)
    assert (smallest.compare, smallest.steps) == ("gradients", 1)
    assert "sum_not_mean" in judged.report
    assert f"Again: {judged.repeat}" in "\n".join(search.report())
    false_alarms = sum(bool(one.wrong) for one in search.judged.values())
    assert false_alarms > 0
    assert exploration.closing_line(search).startswith(
        f"6 random right cases: {false_alarms} false alarms"
    )


def test_the_mean_of_means_is_found_though_equal_shards_pass_and_shrinks_to_few_examples() -> None:
    search = explored(right_step, 16)
    equal = [
        judged
        for variation, judged in search.judged.items()
        if variation.shards in ("equal", "interleaved")
    ]
    assert {judged.outcome for judged in equal} == {"same"}
    ((smallest, judged),) = search.smallest
    assert (judged.outcome, judged.reason) == ("different", "uneven_shards_weighted_equally")
    assert smallest == Variation("1x2", "uneven", 3, torch.float64, 0, 1)
    assert "uneven_shards_weighted_equally" in judged.report


def test_a_step_that_raises_on_an_empty_shard_only_is_found_by_that() -> None:
    search = explored(refuses_an_empty_shard, 16, layout="1x2", seed=0, dtype=torch.float64)
    ((smallest, judged),) = search.smallest
    assert (judged.outcome, judged.reason) == ("failed", "a rank failed: ValueError")
    assert (smallest.shards, smallest.examples) == ("empty", 1)
    assert "nothing to train on" in judged.report
    assert "different" not in outcomes(search)


def test_a_right_step_is_right_in_all_variations() -> None:
    search = explored(global_mean, 16)
    assert outcomes(search) == {"same"}
    assert len(search.judged) == 16
    assert not search.smallest


def test_what_the_caller_gives_is_held() -> None:
    given = {"shards": "2+1", "seed": 7, "dtype": torch.float32, "examples": (4, 0, 5)}
    for one in drawn_of(right_step, 2, given=given):
        assert (one.shards, one.seed, one.dtype, one.examples) == tuple(given.values())
        assert one.layout in ("1x2", "2x1")
        assert one.steps == 1


def test_a_trainer_keeps_its_examples_its_ranks_and_its_steps() -> None:
    fields = {"layout": "2x2", "shards": "own"}
    drawn = drawn_of(right_step, 20, compare="update", steps=3, fields=fields)
    assert {one.layout for one in drawn} == {"1x4", "2x2", "1+3"}
    assert {(one.shards, one.examples, one.steps) for one in drawn} == {("own", None, 3)}


def test_every_variation_deals_the_examples_that_it_takes() -> None:
    drawn = drawn_of(right_step, 200)
    assert {one.layout for one in drawn} == set(OWN_LAYOUTS)
    for one in drawn:
        assert isinstance(one.examples, int)
        assert isinstance(one.steps, int)
        assert one.examples % one.steps == 0
        dealt = split(one.shards, one.examples // one.steps, parse(one.layout).world_size)
        assert dealt.sizes.count(0) == (one.shards == "empty")
        assert 1 <= one.examples <= EXAMPLES


def test_the_line_of_the_smallest_case_repeats_it(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"{user_file}:right_step", "--explore", "20", "--layout", "1x2"]
    assert main(["check", *arguments]) == 1
    report = capsys.readouterr().out.partition("The smallest case that is different")[2]
    line = report.partition("Again: ")[2].partition("More: ")[0].strip()
    assert line.endswith("mine.py:right_step --layout 1x2 --shards uneven --seed 0 --examples 3")
    assert main([*shlex.split(line)[1:], "--full"]) == 1
    again = capsys.readouterr().out
    assert "uneven_shards_weighted_equally" in again
    assert "3 of 3 examples given" in again
    assert main(["check", f"{user_file}:global_mean", "--explore", "8", "--layout", "1x2"]) == 0


def test_examples_are_taken_by_number_or_by_position() -> None:
    one = catalogue.trials("ddp_mean")[0]
    assert with_examples(one.case, 4).examples == 4
    with pytest.raises(BadCase, match="the catalogue makes its own batch"):
        with_examples(one.case, (0, 1))
    read = [build.parse(text) for text in ("3", "0,2,1", "7,")]
    assert read == [3, (0, 2, 1), (7,)]
    whole = make_batch(torch.Generator().manual_seed(3))
    some = SubsetBuilder(make_batch, (5, 0))(torch.Generator().manual_seed(3))
    assert torch.equal(some["rows"], whole["rows"][[5, 0]])


def test_interrupted_the_search_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    run_trial = exploration.run_trial
    left = iter(range(3))

    def interrupted(trial: catalogue.Trial) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run_trial(trial)

    monkeypatch.setattr(exploration, "run_trial", interrupted)
    search = exploration.search_suite(right=20, wrong=0, seed=0)
    assert (len(search.judged), search.stopped) == (3, "interrupted")
    assert any("interrupted" in line for line in search.report())
