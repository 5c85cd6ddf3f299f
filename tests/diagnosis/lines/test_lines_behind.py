"""The lines that set what a line reads are found, also far away and through functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.diagnosis.lines.behind import lines_behind
from ddp_equivalence.diagnosis.lines.origins import divisors, gone_through
from ddp_equivalence.diagnosis.lines.source import RunLines
from ddp_equivalence.diagnosis.setting import Reading
from ddp_equivalence.measurement.calls import CodeLine

SOURCE = """
class Pool:
    def __init__(self, rank):
        self.slot = rank.local_rank
        self.unused = 3

    def collect(self, own):
        parts = [None] * 4
        parts[self.slot] = own
        if not parts:
            parts = []
        return join(parts)


class Cache:
    def __init__(self, kept, first):
        self.first = first
        self.unsorted = []

    def taken(self, kept):
        self.unsorted.append(kept)
        return kept[self.first :]


def cached(kept, rank):
    cache = Cache(kept, first=2 * rank)
    losses = []
    for one in range(len(kept)):
        losses.append(counted(one))
    return sum(losses)


def counted(batch):
    mask = batch["mask"]
    return mask.sum()


def mean(batch, total):
    count = counted(batch)
    factor = 2
    if factor == 3:
        count = 1
    value = total / count
    return value


def targets(batch):
    return batch["targets"]


class Scaler:
    def __init__(self):
        self.scale = 1.0

    def adapt(self, loss):
        self.scale = 2.0 ** round(loss)

    def unscale(self, gradient):
        return gradient / self.scale


class Window:
    def __init__(self, model, size, every=4):
        self.model, self.every = model, every

    def part(self):
        return 1 / self.every


def windowed(model):
    return Window(model, 3).part()


def cross_entropy(output, batch):
    return F.cross_entropy(output, targets(batch))


def balance(odds, share):
    return (odds * share).sum()


def balanced(odds, assigned):
    share = assigned.mean(0)
    likely = odds.log().mean()
    return likely + balance(odds, share)
"""

LINES = SOURCE.splitlines()


@pytest.fixture
def ran(tmp_path: Path) -> tuple[str, RunLines]:
    file = tmp_path / "pooled.py"
    file.write_text(SOURCE)
    not_run = {number_of("parts = []"), number_of("count = 1")}
    every = {
        CodeLine(str(file), number, function_at(number)): 1
        for number, text in enumerate(LINES, 1)
        if text.strip() and number not in not_run
    }
    order = {line: number for number, line in enumerate(every, 1)}
    return str(file), RunLines(every, order)


def number_of(text: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if line.strip() == text)


def function_at(number: int) -> str:
    named = [line.split("def ")[1].split("(")[0] for line in LINES[:number] if "def " in line]
    return named[-1] if named else "<module>"


def test_nothing_behind_what_is_known_to_be_right_is_shown(ran: tuple[str, RunLines]) -> None:
    file, run = ran
    number = number_of("return value")
    asked = list[tuple[str, bool]]()

    def is_right(reading: Reading) -> bool:
        asked.append((reading.name, reading.passed))
        return reading.name == "value"

    at = CodeLine(file, number, function_at(number))
    assert lines_behind(run, at, 2, is_right) == []
    assert asked == [("value", False)]


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        ("return join(parts)", ["parts[self.slot] = own", "self.slot = rank.local_rank"]),
        ("value = total / count", ["count = counted(batch)"]),
        ("return F.cross_entropy(output, targets(batch))", []),  # no line sets F.cross_entropy
        ("return value", ["value = total / count", "count = counted(batch)"]),
        ("parts[self.slot] = own", ["self.slot = rank.local_rank", "parts = [None] * 4"]),
        ("factor = 2", []),
        ("return kept[self.first :]", ["cache = Cache(kept, first=2 * rank)"]),
        ("return sum(losses)", ["losses.append(counted(one))", "for one in range(len(kept)):"]),
        ("return gradient / self.scale", ["self.scale = 2.0 ** round(loss)"]),
        (  # the sum to which the function's result is added is not read in it
            "return (odds * share).sum()",
            ["return likely + balance(odds, share)", "share = assigned.mean(0)"],
        ),
    ],
)
def test_the_nearest_lines_behind_come_first(
    line: str, behind: list[str], ran: tuple[str, RunLines]
) -> None:
    file, run = ran
    number = number_of(line)
    found = lines_behind(run, CodeLine(file, number, function_at(number)), most=2)
    assert [LINES[one.line.number - 1].strip() for one in found] == behind


def test_a_divisor_may_come_from_one_of_several_attributes_and_from_a_default(
    ran: tuple[str, RunLines],
) -> None:
    file, run = ran
    line = CodeLine(file, number_of("return 1 / self.every"), "part")
    found = [(LINES[one.line.number - 1].strip(), one.gives) for one in divisors(run, line)]
    assert found == [
        ("self.model, self.every = model, every", "sets every"),
        ("def __init__(self, model, size, every=4):", "sets every"),
    ]


def test_a_note_says_which_line_reads_what(ran: tuple[str, RunLines]) -> None:
    file, run = ran
    number = number_of("parts[self.slot] = own")
    first, *_ = lines_behind(run, CodeLine(file, number, "collect"), most=1)
    assert first.note == f"sets slot, which line {number} reads"


def test_a_note_says_that_a_value_is_added_to_and_not_that_it_is_set(
    ran: tuple[str, RunLines],
) -> None:
    file, run = ran
    number = number_of("return sum(losses)")
    notes = [one.note for one in lines_behind(run, CodeLine(file, number, "cached"), most=3)]
    assert notes[0] == f"adds to losses, which line {number} reads"
    assert not any(note.startswith("returns") for note in notes)


def test_a_loop_over_numbers_goes_through_nothing_that_was_made(ran: tuple[str, RunLines]) -> None:
    file, run = ran
    line = CodeLine(file, number_of("losses.append(counted(one))"), "cached")
    assert gone_through(run, [line]) == []
