"""What the user's code prints in the judging process does not bury the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.output import MOST_KEPT, kept_output, report_of_kept
from tests.package.report.report_cases import USER_FILE

FILE = f"""\
{USER_FILE.replace("2x2", "1x2").replace("nn.Linear(5, 3)", "Model(5, 3)")}class Model(nn.Linear):
    def forward(self, rows):
        print("shape of the rows:", *rows.shape)
        return super().forward(rows)


def step(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    (1.1e-5 * loss(ddp, shard)).backward()


def right(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    loss(ddp, shard).backward()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "printing.py"
    path.write_text(FILE)
    return path


def test_the_report_comes_first_and_says_how_much_was_printed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{file}:step"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("different: step")
    assert "shape of the rows" not in printed
    assert printed.splitlines()[-1].startswith("  In this process your code printed ")


def test_factors_that_would_be_printed_as_zero_have_digits_that_count(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{file}:step"]) == 1
    assert "every rank holds  1.1e-05  1.1e-05" in capsys.readouterr().out
    assert main(["check", f"{file}:step", "--full"]) == 1
    full = capsys.readouterr().out
    assert "every rank holds  1.1e-05  1.1e-05" in full
    assert "Your code printed in this process:\nshape of the rows: 16 5\n" in full


def test_a_check_in_process_prints_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:right", "--in-process"]) == 0
    assert capsys.readouterr().out.startswith("shape of the rows:")


def test_what_was_printed_before_an_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with kept_output(unless=False):
            print("a clue")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert capsys.readouterr().err == "a clue\n"


def test_only_the_end_of_much_output_is_kept() -> None:
    with kept_output(unless=False) as kept:
        for number in range(100_000):
            print("line", number)
    text = report_of_kept(kept.getvalue(), full=True)
    assert text.endswith("line 99999\n")
    assert len(text) < MOST_KEPT + 100
    assert report_of_kept(kept.getvalue(), full=False) == (
        "  In this process your code printed 100,000 lines, which --full shows.\n"
    )
