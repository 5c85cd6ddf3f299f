"""Whatever ends a run or is scarce around it: it ends clearly and leaves nothing running, no file.

``HOSTILE_ROUNDS=9 pytest tests/suite/test_hostile_surroundings.py`` sends each signal at each
moment, three times; the moments are random, and the same again for the same number.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks import process_tree
from tests.package.own_cases import own_case, right_step
from tests.package.ranks import leftovers
from tests.package.ranks.leftovers import Place
from tests.package.someone_elses_run import LONGEST, command, environment, hear_ctrl_c, run

ROUNDS = int(os.environ.get("HOSTILE_ROUNDS", "1"))

CONFTEST = """
import os
from ddp_equivalence.ranks.server import start_early

def tell(news):
    with open(os.environ["NEWS"], "a") as file:
        file.write(news + "\\n")

def pytest_configure(config):
    if not config.getoption("numprocesses"):
        start_early()
        tell("the fork server starts")
"""
"""Before their tests import torch, so that both is done at the same time."""

BEGIN = """
import os, signal, socket, subprocess, tempfile, time
from multiprocessing import forkserver
import pytest, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from conftest import tell
from ddp_equivalence import Case, RankFailed, assert_equivalent

def build():
    return nn.Linear(3, 2)

def batch(generator):
    return torch.randn(24, 3, generator=generator)

def loss(model, rows):
    return model(rows).square().mean()

def step(model, rows, rank):
    tell("ranks work")
    print("a long line " * 20_000)
    ddp = DistributedDataParallel(model)
    loss(ddp, rows).backward()

def case(layout):
    return Case(model=build, batch=batch, loss=loss, layout=layout)
"""

TRAINS = """
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains(layout):
    tell(f"{layout} begins")
    assert_equivalent(case(layout), step)
    tell(f"{layout} ends")
"""

FILLS = """
def test_fills_its_temporary_folder():
    with open(tempfile.gettempdir() + "/full", "wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(2**10))
"""

RAISES = """
def raises(model, rows, rank):
    raise ValueError("no such thing")

def test_raises():
    with pytest.raises(RankFailed, match="no such thing"):
        assert_equivalent(case("1x2"), raises)
"""

HANGS = """
def hangs(model, rows, rank):
    if CHILDREN:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    tell(f"rank {rank.rank} hangs")
    time.sleep(1000)

def test_hangs():
    assert_equivalent(case("1x2"), hangs)
"""

KILLS_ITS_WORKER = """
def kills_its_worker(model, rows, rank):
    torch.distributed.barrier()
    if rank.rank == 0:
        os.kill(int(os.environ["WORKER"]), signal.SIGKILL)
    time.sleep(1000)

def test_killed(monkeypatch):
    monkeypatch.setenv("WORKER", str(os.getpid()))
    assert_equivalent(case("1x2"), kills_its_worker)
"""

ASKS_AND_VANISHES = """
def test_asks_and_vanishes():
    server = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.connect(server._forkserver_address)
    os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
"""

PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin,ddp_equivalence.pytest_plugin",
}
"""Not all that are installed: importing them takes as long as the rest of a run."""


def variables(place: Place) -> dict[str, str]:
    """What a run has in its environment, beside what these tests have in theirs."""
    return place.environment | PLUGINS


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with leftovers.place(tmp_path) as here:
        yield here


def theirs(place: Place, *layouts: str, tests: str = TRAINS) -> None:
    """Their test file: checks on these layouts."""
    (place.folder / "conftest.py").write_text(CONFTEST)
    path = place.folder / "test_training.py"
    path.write_text(f"{BEGIN}\nLAYOUTS = {layouts!r}\n{tests}")


MOMENTS = {
    "while it imports": ("", 2.0),
    "while the fork server imports": ("the fork server starts", 2.0),
    "while ranks start": ("2x1 begins", 0.2),
    "while ranks work": ("ranks work", 0.05),
    "between checks": ("1x2 ends", 0.1),
    "at the end": ("2x1 ends", 0.5),
}
"""Moment -> what their tests tell when it begins, and the seconds in which to send a signal."""

STATUS = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGINT: pytest.ExitCode.INTERRUPTED,
    signal.SIGTERM: -signal.SIGTERM,
}
"""Exit status of a run whose tests are met by a signal."""

HANG = ("rank 0 hangs", "rank 1 hangs")

Send = Callable[[int, int], None]


def ended(
    place: Place, number: signal.Signals, *news: str, delay: float = 0.0, send: Send = os.kill
) -> tuple[int, str]:
    """Exit status and output of a run that gets a signal ``delay`` seconds after all this news."""
    with open(place.folder / "output", "w+") as output:
        process = subprocess.Popen(
            command(),
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(variables(place)),
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        while not set(news) <= set(place.news().splitlines()) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(delay)
        send(process.pid, number)
        process.wait(LONGEST)
        output.seek(0)
        return process.returncode, output.read()


def moments() -> list[Any]:
    """Every moment in every round, the signals in turn."""
    found = []
    for turn in range(ROUNDS):
        for place, moment in enumerate(MOMENTS):
            number = list(STATUS)[(place + turn) % len(STATUS)]
            found.append(pytest.param(moment, number, turn, id=f"{moment}-{number.name}-{turn}"))
    return found


@pytest.mark.parametrize(("moment", "number", "turn"), moments())
def test_a_run_that_gets_a_signal_at_any_moment_leaves_nothing(
    moment: str, number: signal.Signals, turn: int, place: Place
) -> None:
    """To pytest alone, as from ``kill`` or from a system that is out of memory."""
    theirs(place, "1x2", "2x1")
    news, seconds = MOMENTS[moment]
    delay = random.Random(f"{moment} {turn}").uniform(0.0, seconds)
    code, text = ended(place, number, *filter(None, [news]), delay=delay)
    # An import may swallow an interrupt: Python drops those that meet a callback.
    swallowed = number == signal.SIGINT and "imports" in moment
    unheard = (swallowed or moment == "at the end") and "2 passed" in text
    assert code in (STATUS[number], -number) or unheard, text
    assert not place.left()


@pytest.mark.parametrize("number", list(STATUS)[:ROUNDS], ids=lambda number: number.name)
def test_ranks_that_hang_end_with_the_run_and_so_do_their_children(
    number: signal.Signals, place: Place
) -> None:
    """To the process group, as from a terminal or from a CI that cancels its job."""
    theirs(place, tests="CHILDREN = True" + HANGS)
    code, text = ended(place, number, *HANG, send=os.killpg)
    assert code == STATUS[number], text
    assert not place.left()


def test_ranks_that_hang_end_where_the_fork_server_is_killed_as_well(place: Place) -> None:
    """Nobody is left who could end them."""

    def kill_all_but_ranks(pid: int, number: int) -> None:
        for each in (pid, *process_tree.children(pid)):
            os.kill(each, number)

    theirs(place, tests="CHILDREN = False" + HANGS)
    code, text = ended(place, signal.SIGKILL, *HANG, send=kill_all_but_ranks)
    assert code == -signal.SIGKILL, text
    assert not place.lives()


def test_a_worker_that_is_killed_is_reported_and_the_others_go_on(place: Place) -> None:
    """Of pytest-xdist, in the middle of a check."""
    theirs(place, "1x2", "2x1", tests=KILLS_ITS_WORKER + TRAINS)
    of_xdist = f"--basetemp={place.folder / 'of_xdist'}"
    code, text = run(place.folder, "-n", "2", of_xdist, more=variables(place))
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert re.search(r"worker 'gw\d' crashed while running 'test_training.py::test_killed'", text)
    assert "1 failed, 2 passed" in text
    assert not place.left()


def test_ranks_start_where_the_fork_server_has_failed_before(place: Place) -> None:
    """It does not survive somebody who asks for a process and vanishes."""
    theirs(place, "1x2", tests=ASKS_AND_VANISHES + TRAINS)
    code, text = run(place.folder, more=variables(place))
    assert code == 0, text
    assert "EOFError" in text
    assert not place.left()


SURROUNDINGS = {
    "little room and no network": """
        hostname no-such-host.invalid
        mount -t tmpfs -o size=64k none "$TMPDIR"
        mount -t tmpfs -o size=64k none /dev/shm
    """,
    "no /proc": """
        mount -t tmpfs -o size=64k none "$TMPDIR"
        mount -t tmpfs none /proc
    """,
}

FULL_DISKS = """
    mount -t tmpfs -o size=64k none /tmp
    mount -o bind /tmp /var/tmp
    cp *.py /tmp
    cd /tmp
    yes > full
    export TMPDIR=/tmp NEWS=/dev/null
"""
"""Every place where Python would make a temporary file, the folder of the run among them."""


def surrounded(place: Place, changes: str, *arguments: str) -> tuple[int, str]:
    """A run with mounts, network and host name of its own, after these changes to them."""
    apart = ["unshare", "--mount", "--net", "--uts"]
    shell = [*apart, "sh", "-c", f'ip link set lo up || exit\n{changes}\nexec "$@"', "sh"]
    need([*shell, "true"], place)
    return run(place.folder, *arguments, before=shell, more=variables(place))


def need(what: list[str], place: Place) -> None:
    """Skip the test where the system does not allow what it needs."""
    try:
        asked = subprocess.run(
            what, cwd=place.folder, env=environment(variables(place)), capture_output=True
        )
        reason = asked.stderr.decode().strip() if asked.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"not permitted here: {reason}")


@pytest.mark.parametrize("changes", SURROUNDINGS)
def test_checks_work_with(changes: str, place: Place) -> None:
    """Temporary folder and /dev/shm of 64 KiB, the first filled; a host of a name that nobody
    knows, with nothing but its loopback.
    """
    theirs(place, "1x2", tests=FILLS + RAISES + TRAINS)
    code, text = surrounded(place, SURROUNDINGS[changes])
    assert code == 0, text
    assert not place.left()


def test_no_room_on_any_disk_is_a_clear_error(place: Place) -> None:
    for needed in (sys.prefix, sys.base_prefix, str(Path(__file__).resolve())):
        if needed.startswith(("/tmp/", "/var/tmp/")):
            pytest.skip(f"{needed} would be covered by the full disks of this test")
    theirs(place, "1x2")
    code, text = surrounded(place, FULL_DISKS, "--capture=no")  # pytest captures into files
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "Not compared: a rank failed" in text
    assert "2 ranks could not be started: [Errno 2] No usable temporary directory" in text
    assert not place.left()


def limited(place: Place, *limits: str) -> tuple[int, str]:
    """A run within these limits; as a user of its own, whose processes nobody else starts."""
    user = ["setpriv", "--reuid=61234", "--clear-groups"]
    files = ["--inh-caps=-all,+dac_override", "--ambient-caps=+dac_override"]
    before = [*user, *files, "prlimit", *limits, "--"]
    need([*before, "true"], place)
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(place.folder, before=before, more=variables(place) | threads)


HOLDS_FILES = """
HELD = [open(os.devnull) for _ in range(150)]
"""


def test_idle_ranks_make_room_where_descriptors_are_few(place: Place) -> None:
    """30 ranks: 6 descriptors each, where the process of the tests has 100 to spare."""
    layouts = ("1x2", "1x4", "2x2", "1x8", "2x4", "1+3")
    theirs(place, *layouts, tests=HOLDS_FILES + TRAINS)
    code, text = limited(place, "--nofile=256")
    assert code == 0, text
    assert "Traceback" not in text  # of a fork server that ended in the middle of a start
    assert not place.left()


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("--nofile=24", "4 ranks could not be started: [Errno 24] Too many open files"),
        ("--nproc=5", "4 ranks could not be started: [Errno 11] the fork server has ended"),
    ],
)
def test_too_little_room_for_one_set_of_ranks_is_a_clear_error(
    limit: str, says: str, place: Place
) -> None:
    theirs(place, "1x4")
    code, text = limited(place, limit)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "Not compared: a rank failed" in text
    assert says in text
    assert not place.left()


def test_a_rank_that_cannot_join_the_group_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    verdict = check(own_case(), right_step)
    assert verdict.failure is not None
    assert "nowhere0" in verdict.failure.ends[0].what


def asks_for_memory(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        limit_memory()
        bytearray(2**30)
    right_step(model, shard, rank)


def asks_for_a_large_tensor(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        limit_memory()
        torch.zeros(2**30)
    right_step(model, shard, rank)


def limit_memory() -> None:
    """64 MiB from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, most))


@pytest.mark.parametrize(
    ("step", "what"),
    [(asks_for_memory, "MemoryError"), (asks_for_a_large_tensor, "can't allocate memory")],
)
def test_a_rank_without_memory_is_the_root_cause_and_the_next_case_is_right(
    step: Any, what: str
) -> None:
    verdict = check(own_case(), step)
    assert verdict.failure is not None
    assert verdict.failure.ends[0].rank == 1
    assert what in verdict.failure.ends[0].what
    assert check(own_case(), right_step).outcome == "same"
