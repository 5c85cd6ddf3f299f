"""Training scripts as they are: what ``observe`` says of right ones and of broken ones."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence import NotEquivalent, NothingCompared, observe
from ddp_equivalence.commands.main import main
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.report.render import line_to_look_at
from tests.package.observed_scripts.observing import SCRIPTS, observed, source_of_fault

LIMIT = 1e-13
"""The scripts compute in float64, so that right ones agree to a few eps."""


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        pytest.param("classifier.py", 3, id="sampler, loader, dropout"),
        pytest.param("language_model.py", 3, id="no loader, micro-batches divided among ranks"),
        pytest.param("adversarial.py", 4, id="two optimizers in turn, noise"),
        pytest.param("loss_scale.py", 3, id="loss scale, loader read ahead"),
        pytest.param("detector.py", 3, id="lists of images and boxes"),
        pytest.param("tagger.py", 3, id="rows sorted by length; a loss annealed by the step"),
    ],
)
def test_a_right_script_trains_as_in_one_process(script: str, steps: int) -> None:
    found = observed(script)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * steps
    errors = [verdict.error for verdict in found.verdicts]
    assert all(error is not None and error < LIMIT for error in errors)
    assert found.assert_equivalent() is found
    assert str(found).startswith(f"same: {script}: {steps} steps on 2 ranks as in one process\n")


def test_one_process_counts_the_steps_before_those_that_are_recorded() -> None:
    """The weight of the loss of this script is the number of the step."""
    found = observed("tagger.py", from_step=2, steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 2, str(found)


@pytest.mark.parametrize(
    ("script", "word", "cause", "line"),
    [
        ("classifier.py", "unwrapped", "no_all_reduce", "loss.backward("),
        ("classifier.py", "raw", "raw_module_called", "output = net(inputs)"),
        ("classifier.py", "sum", "mean_not_sum", "loss = cross_entropy("),
        ("classifier.py", "times", "sum_not_mean", "loss = loss * dist.get_world_size()"),
        ("classifier.py", "same_rows", "every_rank_same_data", "loader = kind(data"),
        ("classifier.py", "weighed", "statistic_not_additive", "loss = loss + output"),
        ("classifier.py", "stale", "stale_gradient_added", "optimizer.zero_grad()"),
        ("classifier.py", "hook", "low_precision_reduce", "model.register_comm_hook("),
        ("classifier.py", "ignored", "token_counts_weighted_equally", "loss = cross_entropy("),
        ("classifier.py", "clip", "clipped_otherwise", "nn.utils.clip_grad_norm_("),
        ("detector.py", "sum", "mean_not_sum", "loss = losses.sum()"),
        ("language_model.py", "undivided", "accumulation_not_divided", "loss.backward()"),
        ("language_model.py", "uneven", "uneven_shards_weighted_equally", "loss = model("),
        ("loss_scale.py", "times", "sum_not_mean", "loss = loss * dist.get_world_size()"),
        ("loss_scale.py", "scaled", "clipped_while_scaled", "nn.utils.clip_grad_norm_("),
    ],
)
def test_a_broken_script_is_different_and_its_line_is_named(
    script: str, word: str, cause: str, line: str
) -> None:
    found = observed(script, word)
    assert (found.outcome, found.cause) == ("different", cause)
    assert source_of_fault(found).startswith(line)
    with pytest.raises(NotEquivalent):
        found.assert_equivalent()


def test_a_loss_with_a_reduced_count_is_judged_though_one_rank_alone_has_another_count() -> None:
    """Its model returns on each rank what it returns in one process."""
    found = observed("detector.py", "counts")
    assert found.outcome == "different", str(found)
    assert source_of_fault(found) == "loss = loss + losses.square().sum() / boxes"


def test_a_reduced_count_says_nothing_of_a_loss_that_one_process_does_not_repeat() -> None:
    found = observed("detector.py", "counts", "moody", steps=1)
    assert found.verdict.unknown_because is UnknownBecause.CANNOT_REPLAY, str(found)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param("classifier.py", "ahead noise", id="a loader ahead of the noise"),
        pytest.param("classifier.py", "crops", id="several entries of a row, dropped alone"),
        pytest.param("loss_scale.py", "by_hand", id="a loss scale that is divided by hand"),
        pytest.param("detector.py", "named", id="lists of rows in a named argument"),
        pytest.param("detector.py", "one", id="one row with its boxes"),
        pytest.param("detector.py", "uncollated", id="dicts that are not collated"),
        pytest.param("classifier.py", "probed", id="a module that one rank calls alone"),
        pytest.param("classifier.py", "evaluates", id="an evaluation of the same rows on a rank"),
    ],
)
def test_what_a_right_script_may_do(script: str, words: str) -> None:
    found = observed(script, *words.split(), steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 2, str(found)


@pytest.mark.parametrize(("word", "outcome"), [("", "same"), ("times", "different")])
def test_a_layer_that_computes_in_float32_has_the_limit_of_float32(word: str, outcome: str) -> None:
    found = observed("classifier.py", "standardised", word, steps=1)
    assert found.outcome == outcome


def test_the_optimizer_that_steps_second_is_judged_by_itself() -> None:
    found = observed("adversarial.py", "double")
    outcomes = [verdict.outcome for verdict in found.verdicts]
    assert outcomes == ["same", "different", "same", "different"]
    assert found.cause == "sum_not_mean"
    assert found.verdict.subject == "adversarial.py, step 2 of 4 (Adam)"


def test_answers_stay_when_the_script_has_to_be_started_again() -> None:
    """It makes eight steps, and is asked for more than that."""
    found = observed("classifier.py", "weighed", "short", steps=1)
    assert found.cause == "statistic_not_additive"


def test_each_step_is_compared_with_one_of_the_same_optimizer() -> None:
    """One optimizer steps after every other batch, and the other one between."""
    found = observed("adversarial.py", "turns", "double", steps=4)
    assert [verdict.outcome for verdict in found.verdicts] == ["same", "different"] * 2
    assert found.cause == "sum_not_mean"


def test_a_gradient_that_is_zero_shows_nothing() -> None:
    found = observed("classifier.py", "zero", steps=1)
    assert found.verdict.unknown_because is UnknownBecause.REFERENCE_IS_ZERO
    assert "so is its loss" in found.verdict.reason
    with pytest.raises(NothingCompared):
        found.assert_equivalent()


def test_a_script_that_does_not_take_the_rows_that_it_is_given_shows_nothing() -> None:
    found = observed("adversarial.py", "constant")
    assert found.verdict.unknown_because is UnknownBecause.CANNOT_REPLAY
    assert "with 16 rows in one process, and with 24 on all ranks" in found.verdict.reason


@pytest.mark.parametrize("words", ["fixed", "fixed uniform"])
def test_a_script_may_make_rows_itself_as_many_on_each_rank_as_it_reads(words: str) -> None:
    found = observed("adversarial.py", *words.split())
    assert [one.outcome for one in found.verdicts] == ["same"] * 4, str(found)
    found = observed("adversarial.py", "double", *words.split())
    assert [one.outcome for one in found.verdicts] == ["same", "different"] * 2, str(found)


def test_a_parameter_that_is_frozen_on_one_rank_is_named() -> None:
    found = observed("classifier.py", "frozen", steps=1)
    assert (found.outcome, found.cause) == ("different", "parameter_frozen_on_one_rank")
    assert "0.bias is frozen on rank 1 only" in str(found)


def test_a_script_that_changes_its_rows_by_rank_shows_nothing() -> None:
    found = observed("classifier.py", "by_rank", steps=1)
    assert found.verdict.unknown_because is UnknownBecause.CANNOT_REPLAY
    assert "called its model with other values than that rank" in found.verdict.reason


def test_a_script_that_always_takes_the_same_port_is_watched_too() -> None:
    """The one process, which still runs then, has to leave the port to the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = observed("fixed_port.py", str(port), steps=1)
    assert found.cause == "sum_not_mean"
    assert source_of_fault(found).startswith("(model(rows).square().mean() * world_size)")


def test_a_planted_fault_is_found_in_a_script() -> None:
    found = observed("classifier.py", plant="sum_not_mean", steps=1)
    assert (found.outcome, found.cause) == ("different", "sum_not_mean")


def test_a_fault_of_the_reduction_is_not_taken_for_one_of_micro_batches() -> None:
    """The script divides its micro-batches among two ranks, so that a sum of them is twice the mean
    in one process, too.
    """
    found = observed("language_model.py", plant="averaged_twice", steps=1)
    assert (found.outcome, found.cause) == ("different", "averaged_twice")


def test_a_scale_that_only_the_ranks_have_is_clipped_with_the_gradients() -> None:
    found = observed("classifier.py", plant="gradient_scaled_not_unscaled", steps=1)
    assert (found.outcome, found.cause) == ("different", "clipped_while_scaled")


def test_a_planted_fault_that_never_fires_shows_nothing() -> None:
    found = observed("classifier.py", "unwrapped", plant="sum_not_mean", steps=1)
    assert found.verdict.unknown_because is UnknownBecause.PLANTED_FAULT_NEVER_FIRED


def test_without_float64_the_limit_is_that_of_the_precision_of_the_script() -> None:
    found = observed("classifier.py", precision="own", steps=1)
    assert (found.outcome, found.float64) == ("same", False)
    limit = found.verdict.limit
    assert limit is not None
    assert 1e-6 < limit < 1e-4
    broken = observed("classifier.py", "times", precision="own", steps=1)
    assert (broken.outcome, broken.cause) == ("different", "sum_not_mean")


def test_flat_shows_what_accumulation_does_to_one_process_too() -> None:
    command = f"{sys.executable} accumulating.py --nprocs 1 --micro-batches 1"
    right = observed("accumulating.py", flat=command, steps=1)
    assert right.outcome == "same"
    wrong = observed("accumulating.py", "undivided", flat=command, steps=1)
    assert (wrong.outcome, wrong.cause) == ("different", "accumulation_not_divided")
    without_flat = observed("accumulating.py", "undivided", steps=1)
    assert without_flat.outcome == "same"  # one process accumulates in the same way


def test_rows_that_several_ranks_have_read_are_counted() -> None:
    """The gradients of these steps are right, but some rows count twice in an epoch."""
    found = observed("classifier.py", "apart", steps=6)
    assert found.outcome == "same", str(found)
    (note,) = [one for one in found.notes if "more than one rank" in one]
    assert re.match(r"\d+ of \d+ different rows were read by more than one rank\. Unless ", note)
    assert not [
        one for one in observed("classifier.py", steps=6).notes if "more than one rank" in one
    ]


FLUSHES = ("accumulating.py", "flushes", "--micro-batches", "4")
"""An epoch has 30 batches, and its last step the two that are left."""


def test_the_end_of_an_epoch_is_another_step_and_can_be_observed() -> None:
    beginning = observed(*FLUSHES, steps=1)
    assert beginning.outcome == "same", str(beginning)
    note = (
        "the last step of an epoch, which may have 2 micro-batches instead of 4, was not observed"
    )
    assert f"{note}: --from-step 6 observes it" in beginning.notes
    end = observed(*FLUSHES, from_step=6, steps=2)
    assert [verdict.outcome for verdict in end.verdicts] == ["same", "same"], str(end)
    assert [facts.micro_batches for facts in end.facts] == [4, 2]
    assert not end.notes


def test_a_full_step_at_the_end_of_an_epoch_stays_in_that_epoch() -> None:
    found = observed("accumulating.py", "by_epoch", from_step=9, steps=1)
    assert found.outcome == "same", str(found)


@pytest.mark.parametrize("word", ["by_length", "by_length_before"])
def test_the_loader_of_one_process_is_as_long_as_that_of_a_rank(word: str) -> None:
    """It has more batches, but a loss that is divided by their number is the same."""
    found = observed("accumulating.py", word, steps=2)
    assert found.outcome == "same", str(found)


def test_a_length_that_one_process_is_told_only_at_the_end_of_an_epoch_is_no_fault() -> None:
    found = observed(*FLUSHES, "by_length", from_step=6, steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same", "unknown"], str(found)
    assert "It may be the length of the loader" in found.verdict.reason


def test_a_process_that_starts_the_others_may_ask_how_long_a_loader_is() -> None:
    found = observed("spawned.py", steps=1)
    assert found.outcome == "same", str(found)


def test_a_fault_at_the_end_of_an_epoch_is_named() -> None:
    found = observed(*FLUSHES, "unreduced", from_step=6, steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same", "different"], str(found)
    assert found.cause == "no_sync_left_on"


def test_the_command_prints_the_report_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPTS)
    path = tmp_path / "results.json"
    command = [sys.executable, "classifier.py", "times", "--nprocs", "2"]
    code = main(["observe", "--steps", "1", "--json", str(path), "--", *command])
    assert code == 1
    report = capsys.readouterr().out
    assert "gradients are a sum, not a mean" in report
    assert len(report.splitlines()) <= 16
    found = json.loads(path.read_text())
    assert (found["outcome"], found["cause"]) == ("different", "sum_not_mean")
    assert found["steps"][0]["lines"][0]["file"].endswith("classifier.py")


def test_a_step_that_differs_is_written_as_files_that_stand_alone(tmp_path: Path) -> None:
    found = observed("classifier.py", "times", steps=1, export=tmp_path / "files")
    assert "--export DIR writes the first step that differs" in found.full_report()
    command = [sys.executable, str(tmp_path / "files" / "compare.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "gradients are a sum, not a mean" in shown[0]
    compared = [line for line in shown if "nearest multiple" in line]
    assert len(compared) == 8  # four parameters on two ranks
    assert all(line.endswith(": error 1, nearest multiple 2") for line in compared)


def test_no_temporary_file_of_a_script_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended at a step, before it deletes what it has made."""
    (tmp_path / "files").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "files"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # torch makes it
    assert observed("classifier.py", steps=1).outcome == "same"
    assert list((tmp_path / "files").iterdir()) == []


def test_what_a_script_writes_stays_out_of_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("the user's own")
    shutil.copy(SCRIPTS / "start.py", tmp_path)
    script = (SCRIPTS / "classifier.py").read_text()
    steps = script.replace("optimizer.step()", "optimizer.step()\n        write(net)")
    (tmp_path / "writer.py").write_text(steps.replace("def train(", f"{WRITER}def train("))
    command = (sys.executable, "writer.py", "--nprocs", "2")
    found = observe(command, folder=tmp_path, steps=2, keep=tmp_path / "kept")
    assert found.outcome == "same"
    assert (tmp_path / "weights.pt").read_text() == "the user's own"
    assert not (tmp_path / "log.txt").exists()
    assert list((tmp_path / "kept").rglob("working_folder/log.txt"))


WRITER = """def write(net):
    torch.save(net.state_dict(), "weights.pt")
    with open("log.txt", "a") as file:
        file.write("a step")


"""


def test_lines_of_a_module_that_is_run_by_its_name_are_those_of_the_users_file(
    tmp_path: Path,
) -> None:
    package = tmp_path / "own"
    package.mkdir()
    for name in ("start.py", "classifier.py"):
        shutil.copy(SCRIPTS / name, package)
    script = package / "classifier.py"
    script.write_text(script.read_text().replace("import start", "from own import start"))
    command = (sys.executable, "-m", "own.classifier", "times", "--nprocs", "2")
    found = observe(command, folder=tmp_path, steps=1)
    line = line_to_look_at(found.verdict)
    assert line is not None
    assert (line.file, found.cause) == (str(script.resolve()), "sum_not_mean")
