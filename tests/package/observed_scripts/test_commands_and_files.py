"""How the command for one process is found, what a failure prints, and which files are written."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from ddp_equivalence import BadCase, observe
from ddp_equivalence.commands.exit_codes import INTERRUPTED
from ddp_equivalence.commands.observe import add
from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.ending import ScriptFailed
from ddp_equivalence.observed_scripts.in_script.script_changes import own_copy
from ddp_equivalence.observed_scripts.launch import (
    copy_of_links,
    in_one_process,
    last_words,
    processes_in,
    with_own_scripts,
)
from ddp_equivalence.observed_scripts.options import ObserveOptions, Options
from ddp_equivalence.observed_scripts.queries import VARIABLE
from tests.package.forks import started
from tests.package.observed_scripts.observing import started_until
from tests.package.someone_elses_run import hear_ctrl_c


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        ("torchrun --nproc-per-node 2 t.py -b 2", "torchrun --nproc-per-node 1 t.py -b 2"),
        ("torchrun --nproc_per_node=2 t.py", "torchrun --nproc_per_node=1 t.py"),
        ("torchrun --nproc-per-node=gpu t.py", "torchrun --nproc-per-node=1 t.py"),
        (
            "accelerate launch --multi_gpu --num_processes 2 t.py",
            "accelerate launch --num_processes 1 t.py",
        ),
        ("accelerate launch t.py", "accelerate launch --num_processes 1 t.py"),
        ("python t.py fit --trainer.devices 2", "python t.py fit --trainer.devices 1"),
        ("python t.py --world-size 2 --layers 2", "python t.py --world-size 1 --layers 2"),
    ],
)
def test_the_number_of_processes_is_replaced_by_one(command: str, alone: str) -> None:
    assert " ".join(in_one_process(command.split(), 2)) == alone


def test_a_command_without_a_number_of_processes_is_refused() -> None:
    with pytest.raises(
        BadCase, match=r"one_process is 'python t.py'; it should be .*--one-process"
    ):
        in_one_process(["python", "t.py"], 2)
    assert processes_in(["torchrun", "--nproc-per-node", "4", "t.py"]) == 4
    assert processes_in(["python", "t.py", "--world-size", "1"]) is None  # often that of nodes


def test_the_command_that_repeats_has_every_option_that_decides_what_is_computed() -> None:
    chosen: ObserveOptions = {
        "steps": 1,
        "from_step": 4,
        "one_process": "python t.py --world 1",
        "flat": ("python", "t.py", "--accumulate 1"),
        "precision": "own",
        "dropout": False,
        "as_cpu": 2,
        "in_place": True,
        "deadline": 90.0,
        "plant": "sum_not_mean",
    }
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers().add_parser("observe"))
    words = shlex.split(Options(**chosen).words())
    found = vars(parser.parse_args(["observe", *words, "--", "python", "t.py"]))
    assert found["training"] == ["--", "python", "t.py"]
    assert found["dropout"] is False
    assert shlex.split(found["flat"]) == list(chosen["flat"] or ())
    assert {name: found[name] for name in chosen if name not in ("dropout", "flat")} == {
        name: value for name, value in chosen.items() if name not in ("dropout", "flat")
    }
    names = {one.name for one in dataclasses.fields(Options)}
    assert names - set(chosen) == {"folder", "keep", "export"}
    assert Options().words() == ""


@pytest.mark.parametrize(
    ("variable", "own", "found"),
    [
        pytest.param("NVIDIA_TF32_OVERRIDE", None, "0", id="full precision of float32"),
        pytest.param("NVIDIA_TF32_OVERRIDE", "1", "1", id="unless the user says otherwise"),
        pytest.param("WANDB_MODE", "online", "disabled", id="no network, whatever is said"),
    ],
)
def test_the_environment_of_a_script(
    variable: str, own: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if own is not None:
        monkeypatch.setenv(variable, own)
    (tmp_path / "t.py").write_text(
        f"import os\nprint('it is', os.environ['{variable}'])\nraise SystemExit(1)"
    )
    with pytest.raises(ScriptFailed, match=f"it is {found}"):
        observe((sys.executable, "t.py"), folder=tmp_path, precision="own")


ONE_RANK_ALONE = """
import os, torch
import torch.distributed as dist
os.environ |= {"MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
rank = 0 if os.fork() else 1
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
weight = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
if rank == 0:
    open("trains", "w").close()
    for _ in range(4):
        weight(torch.ones(3, 2)).sum().backward()
        optimizer.step()
dist.barrier()
"""


def test_a_rank_that_trains_something_alone_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(ONE_RANK_ALONE)
    with (
        patch.object(launch, "start", started_until("trains")),
        pytest.raises(ScriptFailed, match="Only rank 0 made them"),
    ):
        observe((sys.executable, "t.py"), folder=tmp_path, steps=2, deadline=2, precision="own")


OF_LAUNCHER = """Traceback (most recent call last):
  File "run.py", line 1, in launch
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
"""
OF_WAITING = """[rank0]: Traceback (most recent call last):
[rank0]:   File "t.py", line 9, in <module>
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9
"""
OF_SCRIPT = """[rank1]: Traceback (most recent call last):
[rank1]:   File "t.py", line 3, in <module>
[rank1]: ValueError: the script's own
"""


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        (OF_SCRIPT + "more\n" + OF_LAUNCHER, "\nValueError: the script's own"),
        (OF_WAITING + OF_SCRIPT + OF_LAUNCHER, "\nValueError: the script's own"),
        (OF_SCRIPT + OF_WAITING, "\nValueError: the script's own"),
        (OF_WAITING + OF_LAUNCHER, "Connection closed by peer [127.0.0.1]:9"),
        ("no error\nat all", "no error\nat all"),
    ],
)
def test_the_error_of_the_script_is_shown_and_not_that_of_its_launcher_or_of_a_rank_that_waits(
    printed: str, last: str
) -> None:
    words = last_words(printed)
    assert words.endswith(last)
    assert "[rank" not in words


def test_the_working_folder_is_made_of_links_which_are_not_written_through(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "data" / "deep").mkdir(parents=True)
    (source / "data" / "deep" / "rows.bin").write_bytes(b"old")
    (source / ".git").mkdir()
    copy_of_links(source, copy)
    rows = copy / "data" / "deep" / "rows.bin"
    assert (rows.is_symlink(), (copy / ".git").is_symlink()) == (True, True)
    assert not (copy / "data").is_symlink()
    inside = os.path.join(os.path.realpath(copy), "")
    own_copy(str(rows), inside)
    assert (rows.is_symlink(), rows.read_bytes()) == (False, b"old")
    rows.write_text("new")
    assert (source / "data" / "deep" / "rows.bin").read_text() == "old"
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(source / "data" / "deep" / "rows.bin")
    own_copy(str(elsewhere), inside)
    assert elsewhere.is_symlink()  # the user's own links outside of the copy stay


def test_scripts_run_under_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = with_own_scripts(["torchrun", "train.py", "other.py", "--x=train.py"], tmp_path)
    assert command == ("torchrun", str(tmp_path / "train.py"), "other.py", "--x=train.py")


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("steps", 0, "from 1"),
        ("from_step", -1, "from 0"),
        ("precision", "float16", "one of auto, float64, own"),
        ("as_cpu", -2, "a number of devices"),
        ("deadline", 0, "seconds above 0"),
        ("folder", "no/such/folder", "a folder that exists"),
        ("keep", ".", "nothing is yet"),
        ("plant", "every_rank_same_data", "a fault that lies in torch"),
        ("plant", "nonsense", "a fault that lies in torch"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused(field: str, value: object, right: str) -> None:
    with pytest.raises(BadCase, match=right) as error:
        Options(**{field: value})  # type: ignore[arg-type]
    assert error.value.field == field


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("", "command"),
        ("python 'open", "command"),
        ((), "command"),
        ("torchrum t.py", "No such fi"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(
    command: str, right: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCase, match=right) as error:
        observe(command, folder=tmp_path)
    assert error.value.field == "command"


def test_python_is_that_of_the_environment_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys\nraise SystemExit(sys.prefix)\n")
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ScriptFailed, match=re.escape(sys.prefix)):
        observe("python train.py --nprocs 2", folder=tmp_path, precision="own")


def test_a_script_that_makes_no_step_says_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise SystemExit('nothing to train')\n")
    with (
        patch.object(launch, "start", started),
        pytest.raises(ScriptFailed, match=r"with exit code 1\.(.|\n)*nothing to train"),
    ):
        observe((sys.executable, "train.py", "--nprocs", "2"), folder=tmp_path)


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ScriptFailed, match=r"was ended after 0\.5 s, after 0 of the 3 steps"):
        observe("python train.py", folder=tmp_path, deadline=0.5, precision="own")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command_that_observes(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n"
    )
    kept = tmp_path / "kept"
    command = ["observe", "--keep", str(kept), "--", sys.executable, "train.py", "--nprocs", "2"]
    with tempfile.TemporaryDirectory() as temporary:
        observing = subprocess.Popen(
            [sys.executable, "-m", "ddp_equivalence", *command],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": temporary},
            preexec_fn=hear_ctrl_c,
        )
        try:
            assert became(lambda: bool(list(kept.rglob("begun"))))
            script = next(one for one in processes_of(kept))
        finally:
            observing.send_signal(number)
            code = observing.wait(60)
        assert became(lambda: not script.is_running() or script.status() == psutil.STATUS_ZOMBIE)
        if number != signal.SIGKILL:
            assert code == INTERRUPTED
            assert os.listdir(temporary) == []


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes of a script whose record lies in the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(VARIABLE, "").startswith(str(folder)):
                found.append(process)
    return found


def became(true: Callable[[], bool]) -> bool:
    """Whether it is true, or becomes true within a minute."""
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()
