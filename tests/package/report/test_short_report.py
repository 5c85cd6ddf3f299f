"""The report of one screen: what it says of a user's own file, and that it stays on one screen."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_equivalence import Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.commands.main import main
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.shares import Shares
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.blocks import WHOLE, FirstThatFits, Shape, defined_at
from ddp_equivalence.report.cause import how_sure, notes
from ddp_equivalence.report.numbers import ShareTable, can_be_shown, how_many_differ
from ddp_equivalence.report.render import report_lines
from ddp_equivalence.report.text import range_of_ranks, shortened
from tests.package.own_cases import own_case, right_step
from tests.package.report.report_cases import USER_FILE

OWN_FILE = f"""\
{USER_FILE}def step(model, shard, rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups[rank.node])
        parameter.grad /= 2
"""

REPORT = """\
different: step (mine.py:21): gradients stay within groups of ranks     [reduced_in_wrong_group]

  Namely: each group divides by its own size
  mine.py:22  groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
              sets groups
> mine.py:25  dist.all_reduce(parameter.grad, group=groups[rank.node])
              2 all_reduce, in groups {0, 1} and {2, 3}; none has all 4 ranks

  examples of      rank 0  rank 1  rank 2  rank 3
  should count       1.00    1.00    1.00    1.00
  ranks 0, 1 hold    2.00    2.00    0.00    0.00
  ranks 2, 3 hold    0.00    0.00    2.00    2.00

  Fix: reduce over all 4 ranks, and divide by 4.
  Fits every element. 2 of 2 parameters differ, most NAME: error NUMBER, limit NUMBER.
  Again: ddp-equivalence check mine.py     More: --full
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_imports: None) -> Path:
    (tmp_path / "mine.py").write_text(OWN_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_prints_one_screen_that_points_at_the_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mine.py"]) == 1
    text = capsys.readouterr().out
    numbers = re.compile(r"most \S+: error \S+, limit \S+\.$", re.MULTILINE)
    text = numbers.sub("most NAME: error NUMBER, limit NUMBER.", text)
    assert text == REPORT


def test_the_full_report_begins_with_the_screen_and_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mine.py", "--full", "--seed", "3"]) == 1
    text = capsys.readouterr().out
    assert text.startswith(REPORT.partition("\n")[0])
    assert "step is not big_batch: reduced_in_wrong_group" in text
    assert "  Ruled out: " in text
    assert "  Again: ddp-equivalence check mine.py --seed 3\n" in text


def test_the_step_of_an_imported_file_is_repeated_on_the_command_line(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    mine = importlib.import_module("mine")
    with settings.using(settings.Settings(trial_seconds=0)):
        verdict = check(mine.case, mine.step)
    assert verdict.cause == "reduced_in_wrong_group"
    assert verdict.repeat == "ddp-equivalence check mine.py:step"


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    found = check(own_case(layout="2x2", shards="6+3+2+1"), right_step)
    assert found.cause == "uneven_shards_weighted_equally", str(found)
    return found


def shares(rows: Mapping[int, tuple[float | None, ...]], **changes: Any) -> Shares:
    fields: dict[str, Any] = {
        "by_rank": rows,
        "by_micro_batch": None,
        "by_example": None,
        "unexplained": dict.fromkeys(rows, 0.0),
        "condition": 3.0,
        "elements": 100,
        "pieces": "ranks",
        "rounding": 1e-6,
    }
    return Shares(**(fields | changes))


def table_of(world_size: int, found: Shares, most_rows: int = 6) -> list[str]:
    lines = ShareTable(found, world_size, ()).lines(Shape(rows=most_rows))
    return [line.text for line in lines]


ALIKE = {
    rank: (2.0,) * 4 + (0.0,) * 4 if rank < 4 else (0.0,) * 4 + (2.0,) * 4 for rank in range(8)
}
OWN_ONLY = {rank: tuple(8.0 * (source == rank) for source in range(8)) for rank in range(8)}
ALL_APART = {rank: tuple(float(rank * source) for source in range(4)) for rank in range(4)}


@pytest.mark.parametrize(
    ("rows", "most_rows", "lines"),
    [
        (
            ALIKE,
            6,
            [
                "  examples of        ranks 0 to 3  ranks 4 to 7",
                "  should count               1.00          1.00",
                "  ranks 0 to 3 hold          2.00          0.00",
                "  ranks 4 to 7 hold          0.00          2.00",
            ],
        ),
        (
            OWN_ONLY,
            6,
            [
                "  Every example should count 1.00 on every rank.",
                "  Each rank holds its own examples 8.00 times, and those of others 0.00 times.",
            ],
        ),
        (
            ALL_APART,
            3,
            [
                "  examples of   rank 0  rank 1  rank 2  rank 3",
                "  should count    1.00    1.00    1.00    1.00",
                "  rank 0 holds    0.00    0.00    0.00    0.00",
                "  rank 1 holds    0.00    1.00    2.00    3.00",
                "  ranks 2, 3 hold other shares",
            ],
        ),
    ],
    ids=["neighbours that count alike", "own examples only", "more rows than there may be"],
)
def test_ranks_that_hold_the_same_share_rows_and_columns(
    rows: Mapping[int, tuple[float, ...]], most_rows: int, lines: list[str]
) -> None:
    assert table_of(len(rows), shares(rows), most_rows) == lines


@pytest.mark.parametrize(
    ("row", "changes", "shown"),
    [
        ((2.0, 0.5), {}, True),
        ((2.0, 0.5), {"unexplained": {0: 0.003}, "rounding": 0.1}, True),
        ((2.0, 0.5), {"unexplained": {0: 0.003}}, False),  # something else is in it
        ((2.0, 0.5), {"unexplained": {0: 0.02}, "rounding": 0.1}, False),
        ((2.0, 0.5), {"unexplained": {0: 0.3}}, False),
        ((2.0, 0.5), {"elements": 2}, False),
        ((2.0, 0.5), {"by_example": {0: (1.0, 1.2, 0.8)}, "elements": 3}, False),
        ((-4.3, 115.0), {"unexplained": {0: 0.0}}, True),
        ((-4.3, 115.0), {"unexplained": {0: 1e-3}}, False),  # it may be noise
    ],
)
def test_shares_are_shown_only_where_no_other_mixture_fits(
    row: tuple[float, ...], changes: dict[str, Any], shown: bool
) -> None:
    assert can_be_shown(shares({0: row}, **changes)) is shown


LONG = "this note is far too long to stand at the side of the line that it is about, " * 2


def crowded(verdict: Verdict, lines: int, detail: str, note: str, repeat: int) -> Verdict:
    """The verdict with more to say than any real one."""
    best: Finding = verdict.findings[0]
    pointed = tuple(
        PointedLine(CodeLine(__file__, number, "f"), note, number == 20, "divide by the number")
        for number in range(20, 20 + lines)
    )
    headline = detail.strip() or "short"
    first = replace(best, detail=detail, headline=headline, fix=LONG, lines=pointed)
    first = replace(first, more=(replace(best, fix=f"also {LONG}", lines=()),) if detail else ())
    return replace(
        verdict,
        findings=(first, replace(best, cause="another_cause", tell_apart=LONG)),
        asked=replace(verdict.asked, planted="sum_not_mean"),
        repeated=False,
        repeat="x" * repeat,
        observed={},
        why_not_watched="of a reason",
    )


def test_every_report_fits_on_one_screen(verdict: Verdict) -> None:
    sizes = set()
    for lines, detail, note, repeat in itertools.product(
        (0, 1, 3), ("", LONG), ("", LONG), (0, 180)
    ):
        found = crowded(verdict, lines, detail, note, repeat)
        texts = [line.text for line in report_lines(found)]
        sizes.add(sum(max(1, -(-len(text) // 100)) for text in texts))
        assert any(text.startswith("> ") for text in texts) is bool(lines)
        assert any(text.startswith(f"  Again: {'x' * repeat}") for text in texts) is bool(repeat)
        assert any(text.startswith("  Fix: ") for text in texts)
    assert max(sizes) == 16


def test_a_difference_that_was_not_watched_says_so_and_why() -> None:
    with settings.using(settings.Settings(trial_seconds=0, second_look=False)):
        found = check(own_case(layout="2x2", shards="6+3+2+1"), right_step)
    assert found.outcome == "different"
    text = " ".join(str(found).split())
    assert (
        "No lines of code are known, because each step runs once here (--explore, --ddp-no" in text
    )


def test_a_second_run_with_other_bits_is_said(verdict: Verdict) -> None:
    assert not any(notes(verdict))
    assert any("left other bits" in note for note in notes(replace(verdict, repeated=False)))


def test_several_causes_that_fit_are_named_with_what_tells_them_apart(verdict: Verdict) -> None:
    best = verdict.findings[0]
    other = replace(best, cause="another_cause", tell_apart="Use another world size.")
    found = replace(verdict, findings=(replace(best, tell_apart=""), other))
    text = " ".join(str(found).split())
    assert "Fits, but another_cause would leave the same numbers; use another world size." in text


def test_the_limit_is_never_cut_for_a_long_name(verdict: Verdict) -> None:
    """A number that ends in dots would say nothing; a name may."""
    long_name = "encoder.layers.0.attention.self.query.projection.weight"
    assert verdict.comparison is not None
    parameters = [replace(one, name=long_name) for one in verdict.comparison.parameters]
    comparison = replace(verdict.comparison, parameters=tuple(parameters))
    found = replace(verdict, comparison=comparison)
    counts = how_many_differ(found)
    item = FirstThatFits([how_sure(found), counts], functools.partial(how_many_differ, found))
    line = item.lines(replace(WHOLE, width=80, texts=1))[-1].text
    assert len(line) <= 80
    assert re.search(r"most enco\S*\.\.\.\S+: error \S+, limit \S+\.$", line), line


def test_a_long_name_is_shortened_in_its_middle() -> None:
    name = "model.layers.17.self_attention.query_key_value.projection.weight"
    assert len(shortened(name, 45)) == 45
    assert shortened(name, 45).startswith("model.layers.1...")
    assert shortened(name, 45).endswith("projection.weight")
    assert shortened("0.bias", 45) == "0.bias"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((0, 1), "ranks 0, 1"),
        ((1, 0, 2), "ranks 0 to 2"),
        ((0, 2, 4), "ranks 0, 2, 4"),
    ],
)
def test_ranks_in_a_row_are_named_as_a_range(ranks: tuple[int, ...], text: str) -> None:
    assert range_of_ranks(ranks) == text


@functools.cache
@functools.lru_cache
def decorated(model: Any, shard: Any, rank: Any) -> None:
    raise NotImplementedError


class Callable:
    def __call__(self, model: Any, shard: Any, rank: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (right_step, "def right_step("),
        (Callable(), "def __call__("),
        (Callable().__call__, "def __call__("),
        (decorated, "def decorated("),
    ],
    ids=["function", "object", "method", "decorated"],
)
def test_the_line_that_defines_a_step_is_found(step: Any, text: str) -> None:
    found = defined_at(step)
    assert found is not None
    assert text in Path(found.file).read_text().splitlines()[found.number - 1]


def test_a_strategy_of_the_catalogue_is_defined_nowhere() -> None:
    assert defined_at("ddp_mean") is None


class WithIdleParameter(nn.Module):
    """The gradient of one of its parameters is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.linear(rows) + 0 * self.idle.sum()


def pushes_the_idle_parameter(model: Any, shard: Any, rank: Any) -> None:
    right_step(model, shard, rank)
    model.idle.grad += 1e-3


def test_what_stands_beside_a_gradient_of_zero_is_not_called_infinite() -> None:
    verdict = check(own_case(model=WithIdleParameter), pushes_the_idle_parameter)
    assert verdict.outcome == "different"
    assert verdict.error == float("inf")  # relative to zero
    assert "not finite" not in verdict.full_report()
    assert "not finite" not in str(verdict)


DEPRECATED = "mine.py:3: FutureWarning: all_gather is deprecated, use another.\n  all_gather(x)\n"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("", ""),
        (DEPRECATED, ""),
        ("step 3\nmine.py:3: UserWarning: Converting a tensor to a scalar.\n", ""),
        (
            "a.py:3: UserWarning: Call optimizer.step() first. See x.\n  b()\n",
            "3: Call optimizer.step() first.",
        ),
        ("C:\\a.py:7: UserWarning: The sampler is unused", "7: The sampler is unused."),
    ],
)
def test_of_what_ranks_printed_the_warnings_on_how_they_train_are_told(
    printed: str, said: str, verdict: Verdict
) -> None:
    text = " ".join(str(replace(verdict, output={0: printed, 1: printed})).split())
    assert text.count("torch warns of line ") == bool(said)
    assert said in text
