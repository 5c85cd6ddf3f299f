"""The suite judges random cases rightly; a search finds and shrinks what a step does wrong."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Rank
from ddp_equivalence.case.build import SubsetBuilder, as_text, parse, with_examples
from ddp_equivalence.commands.explore import drawing, suite, variations_command
from ddp_equivalence.commands.explore.variations_command import (
    LAYOUTS,
    Variation,
    VariationResult,
    VariationsSearch,
    search_space,
    variations,
)
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.strategies import catalogue, trial
from tests.package.own_cases import EXAMPLES, loss, make_batch, own_case, right_step

FILE = """
from tests.package.own_cases import own_case, right_step
from tests.package.commands.explore.test_exploration import global_mean

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


def test_results_that_cannot_be_written_are_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explore", "--right", "1", "--json", "/nowhere/at/all.json"]) == 2
    assert "--json /nowhere/at/all.json should be a file in a folder" in capsys.readouterr().err


def explored(step: Any, wanted: int, **given: Any) -> VariationsSearch:
    return variations_command.search_variations(
        UserCheck(own_case(layout="2x2"), step), given, wanted, str
    )


@pytest.fixture
def user_file(tmp_path: Path, forget_imports: None) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_random_right_cases_are_called_the_same_and_differences_by_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few enough to start their ranks in a moment.
    monkeypatch.setattr(suite, "LAYOUTS", ("1x1", "1x2", "1x3", "2+1"))
    search = suite.search(right=30, wrong=10, seed=5)
    assert [each.repeat for each in search.judged if not each.right] == []
    assert sum(each.outcome == "same" for each in search.judged) >= 28
    # Two draws may be one case.
    known = [each.outcome for each in search.judged if each.trial.cause is not None]
    assert len(known) >= 7
    assert set(known) == {"different"}
    assert {each.trial.strategy for each in search.judged} == set(suite.portable_strategies())


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def names(seed: int) -> list[str]:
        drawn = suite.draw_trials(20, promised=True, seed=seed)
        return [f"{name} {each} {each.case}" for name, trials in drawn.items() for each in trials]

    before = names(1)
    assert len(set(before)) == len(before) == 20
    assert names(1) == before
    assert names(2) != before


@drawing.strategies.composite
def numbers(draw: drawing.strategies.DrawFn) -> tuple[int, ...]:
    return tuple(drawing.integer(draw, 0, 59_999) for _ in range(8))


def test_numbers_are_drawn_evenly_and_the_same_whatever_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawing.draw_different(numbers(), 200, "0")
    # Hypothesis mixes the constants of modules into what it draws.
    (tmp_path / "full_of_numbers.py").write_text(f"numbers = {list(range(1000, 60000, 97))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_numbers")
    assert drawing.draw_different(numbers(), 200, "0") == before
    last = [of_one[-1] for of_one in before]
    assert 60 < sum(number >= 30_000 for number in last) < 140


def test_a_false_alarm_is_shrunk_to_its_smallest_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_cause", lambda trial: None)  # as if all were promised
    monkeypatch.setattr(suite, "portable_strategies", lambda: ("manual_all_reduce_sum",))
    search = suite.search(right=6, wrong=0, seed=0)
    assert search.false_alarms
    ((mistake, report),) = search.smallest_mistakes
    case = mistake.trial.case
    assert case.ranks.world_size == 2
    assert case.catalogue_examples <= 4
    assert (case.shards, case.seed, case.dtype) == ("equal", 0, torch.float64)
    assert (mistake.trial.compare, mistake.trial.steps) == ("gradients", 1)
    assert "sum_not_mean" in report
    text = "\n".join(suite.report_lines(search))
    assert f"Again: {mistake.repeat}" in text
    assert suite.as_json(search)["false_alarms"] == len(search.false_alarms)


def test_the_mean_of_means_is_found_though_equal_shards_pass_and_shrinks_to_three_examples() -> (
    None
):
    search = explored(right_step, 16)
    equal = [
        result
        for variation, result in search.results.items()
        if variation.shards in ("equal", "interleaved")
    ]
    assert {result.outcome for result in equal} == {"same"}
    ((smallest, result, report),) = search.smallest
    assert result == VariationResult("different", "uneven_shards_weighted_equally")
    assert smallest in [Variation("1x2", of, 3, torch.float64, 0, 1) for of in ("1+2", "2+1")]
    assert "uneven_shards_weighted_equally" in report


def test_a_step_that_raises_on_an_empty_shard_only_is_found_by_that() -> None:
    search = explored(refuses_an_empty_shard, 12, layout="1x2", seed=0, dtype=torch.float64)
    ((smallest, result, report),) = search.smallest
    assert result == VariationResult("failed", "a rank failed: ValueError")
    assert (smallest.shards, smallest.examples) == ("0+1", 1)
    assert "nothing to train on" in report
    assert not search.with_outcome("different")


def test_a_right_step_is_right_in_all_variations() -> None:
    search = explored(global_mean, 16)
    assert {result.outcome for result in search.results.values()} == {"same"}
    assert len(search.results) == 16
    assert not search.smallest


def test_what_the_caller_gives_is_held() -> None:
    given = {"shards": "2+1", "seed": 7, "dtype": torch.float32, "examples": (4, 0, 5)}
    space = search_space(own_case(), right_step, given, {})
    for one in drawing.draw_different(variations(space), 5, "0"):
        assert (one.shards, one.seed, one.dtype, one.examples) == tuple(given.values())[:4]
        assert one.layout in ("1x2", "2x1")
        assert one.steps == 1


def test_a_trainer_keeps_its_examples_its_ranks_and_its_steps() -> None:
    options = {"compare": "update", "steps": 3}
    space = search_space(own_case(layout="2x2", shards="own"), right_step, {}, options)
    drawn = drawing.draw_different(variations(space), 20, "0")
    assert {one.layout for one in drawn} == {"1x4", "2x2", "1+3"}
    assert {(one.shards, one.examples, one.steps) for one in drawn} == {("own", None, 3)}


def test_every_variation_deals_the_examples_that_it_takes() -> None:
    space = search_space(own_case(), right_step, {}, {})
    drawn = drawing.draw_different(variations(space), 200, "0")
    assert {one.layout for one in drawn} == set(LAYOUTS)
    for one in drawn:
        taken = one.examples if isinstance(one.examples, int) else len(one.examples or ())
        assert isinstance(one.steps, int)
        sizes = one.shards.split("+")
        of_step = sum(map(int, sizes)) if len(sizes) > 1 else taken // one.steps
        assert of_step * one.steps == taken
        assert 1 <= taken <= EXAMPLES


def test_the_line_of_the_smallest_case_repeats_it(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"{user_file}:right_step", "--explore", "20", "--layout", "1x2"]
    assert main(["check", *arguments]) == 1
    report = capsys.readouterr().out.partition("The smallest case that is different")[2]
    line = report.partition("Again: ")[2].partition("More: ")[0].strip()
    assert line.endswith("mine.py:right_step --layout 1x2 --shards 1+2 --examples 3 --seed 0")
    assert main([*shlex.split(line)[1:], "--full"]) == 1
    again = capsys.readouterr().out
    assert "uneven_shards_weighted_equally" in again
    assert "3 of 3 examples given" in again
    assert main(["check", f"{user_file}:global_mean", "--explore", "8", "--layout", "1x2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--explore", "0"), "--explore 0 should be a number of cases from 1"),
        (
            ("--explore", "3", "--in-process"),
            "--explore 3 should be left out with --in-process",
        ),
        (("--explore", "3", "--examples", "13"), "--examples 13 should be at most the 12 examples"),
        (("--examples", "13"), "--examples 13 should be at most the 12 examples of the batch"),
        (
            ("--examples", "0,12"),
            "--examples 0,12 should be at most the 12 examples of the batch",
        ),
        (("--examples", "0"), "--examples 0 should be a number of examples from 1"),
        (("--examples", "1,1"), "--examples 1,1 should be a number of examples from 1"),
        (("--examples", "some"), "--examples some should be a number of examples from 1"),
        (("--explore", "3", "--shards", "1+1+1+1+1"), "--shards 1+1+1+1+1"),
    ],
)
def test_bad_input_is_told(
    user_file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert main(["check", f"{user_file}:right_step", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--right", "0"), ("--right", "-1"), ("--wrong", "-1")])
def test_exploring_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(["explore", *arguments]) == 2
    assert arguments[0].strip("-") in capsys.readouterr().err


def test_the_catalogue_makes_as_many_examples_as_are_asked_for() -> None:
    one = catalogue.trials("ddp_mean")[0]
    assert with_examples(one.case, 4).examples == 4
    with pytest.raises(BadCase, match="the catalogue makes its own batch"):
        with_examples(one.case, (0, 1))


@pytest.mark.parametrize("subset", [3, (0, 2, 1), (7,)])
def test_a_subset_is_read_as_it_is_written(subset: int | tuple[int, ...]) -> None:
    assert parse(as_text(subset)) == subset


def test_selected_examples_are_those_of_the_batch() -> None:
    whole = make_batch(torch.Generator().manual_seed(3))
    some = SubsetBuilder(make_batch, (5, 0))(torch.Generator().manual_seed(3))
    assert torch.equal(some["rows"], whole["rows"][[5, 0]])
    assert loss(own_case().model(), some).ndim == 0  # type: ignore[operator]


def test_without_hypothesis_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, drawing.__name__)
    with pytest.raises(BadCase, match=r"pip install 'ddp_equivalence\[explore\]'"):
        importlib.import_module(drawing.__name__)


def test_interrupted_the_search_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    run = suite._run
    left = iter(range(3))

    def interrupted(trial: catalogue.Trial) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run(trial)

    monkeypatch.setattr(suite, "_run", interrupted)
    search = suite.search(right=20, wrong=0, seed=0)
    assert (len(search.judged), search.interrupted) == (3, True)
    assert any("INTERRUPTED" in line for line in suite.report_lines(search))


def test_all_draws_are_of_the_strategy_that_is_asked_for() -> None:
    drawn = drawing.draw_different(suite.random_trials("hybrid"), 10, "0")
    assert {trial.strategy for trial in drawn} == {"hybrid"}
