"""However a run is ended, at any moment, it leaves neither a process nor a file behind.

With ``SIGNAL_ROUNDS=9`` every signal is sent at every moment three times. The delays are random,
but the same in every run.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from ddp_equivalence.ranks import process_tree
from tests.package.ranks.marked_run import MarkedRun
from tests.package.ranks.user_tests import HANGS, TRAINS, write_tests
from tests.package.someone_elses_run import LONGEST, command, environment, hear_ctrl_c, run

ROUNDS = int(os.environ.get("SIGNAL_ROUNDS", "1"))

MOMENTS = {
    "while the fork server imports": ("the fork server starts", 2.0),
    "while ranks start": ("2x1 begins", 0.2),
    "while ranks work": ("ranks work", 0.05),
    "at the end": ("2x1 ends", 0.5),
}
"""Moment -> the event at its begin, and the seconds within which the signal is sent."""

EXIT_STATUS = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGINT: pytest.ExitCode.INTERRUPTED,
    signal.SIGTERM: -signal.SIGTERM,
}
"""Signal -> the exit status of a run that receives it during its tests."""

OF_RANKS_THAT_HANG = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)[:ROUNDS]
"""The signals that a run gets whose ranks hang, the first of them in every change."""

BOTH_RANKS_HANG = ("rank 0 hangs", "rank 1 hangs")

Send = Callable[[int, int], None]


def run_with_signal(
    user_run: MarkedRun,
    number: signal.Signals,
    *events: str,
    delay: float = 0.0,
    send: Send = os.kill,
) -> tuple[int, str]:
    """Exit status and output of a run that gets a signal ``delay`` seconds after all the events."""
    with open(user_run.folder / "output", "w+") as output:
        process = subprocess.Popen(
            command(),
            cwd=user_run.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(user_run.environment),
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        while not set(events) <= set(user_run.events()) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(delay)
        send(process.pid, number)
        process.wait(LONGEST)
        output.seek(0)
        return process.returncode, output.read()


def trials() -> list[Any]:
    """Every moment in every round, with the signals in turn.

    The end has the mark ``thorough``: a run with ranks that hang gets the same signal in every
    change, and leaves more that could stay behind.
    """
    parameters = []
    for turn in range(ROUNDS):
        for index, moment in enumerate(MOMENTS):
            number = list(EXIT_STATUS)[(index + turn) % len(EXIT_STATUS)]
            name = f"{moment}-{number.name}-{turn}"
            marks = pytest.mark.thorough if moment == "at the end" else ()
            parameters.append(pytest.param(moment, number, turn, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("moment", "number", "turn"), trials())
def test_a_run_that_gets_a_signal_at_any_moment_leaves_nothing_behind(
    moment: str, number: signal.Signals, turn: int, user_run: MarkedRun
) -> None:
    """Only pytest gets the signal, as from ``kill`` or from a system that is out of memory."""
    write_tests(user_run, "1x2", "2x1")
    event, seconds = MOMENTS[moment]
    delay = random.Random(f"{moment} {turn}").uniform(0.0, seconds)
    code, text = run_with_signal(user_run, number, *filter(None, [event]), delay=delay)
    # Python ignores an interrupt that arrives in a callback, as it may during an import.
    ignored = number == signal.SIGINT and "imports" in moment
    completed = (ignored or moment == "at the end") and "2 passed" in text
    assert code in (EXIT_STATUS[number], -number) or completed, text
    assert not user_run.left_behind()


@pytest.mark.parametrize("number", OF_RANKS_THAT_HANG, ids=lambda number: number.name)
def test_ranks_that_hang_end_with_the_run_and_so_do_their_children(
    number: signal.Signals, user_run: MarkedRun
) -> None:
    """The process group gets the signal, as from a terminal or from a CI that cancels its job."""
    write_tests(user_run, tests="CHILDREN = True" + HANGS)
    code, text = run_with_signal(user_run, number, *BOTH_RANKS_HANG, send=os.killpg)
    assert code == EXIT_STATUS[number], text
    assert ("KeyboardInterrupt" in text) == (number == signal.SIGINT)
    assert not user_run.left_behind()


def test_ranks_that_hang_end_even_if_the_fork_server_is_killed_as_well(user_run: MarkedRun) -> None:
    """Then no process is left that could kill them."""

    def kill_all_but_ranks(pid: int, number: int) -> None:
        for each in (pid, *process_tree.children(pid)):
            os.kill(each, number)

    write_tests(user_run, tests="CHILDREN = False" + HANGS)
    code, text = run_with_signal(
        user_run, signal.SIGKILL, *BOTH_RANKS_HANG, send=kill_all_but_ranks
    )
    assert code == -signal.SIGKILL, text
    assert not user_run.left_running()


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


def test_an_xdist_worker_that_is_killed_is_reported_and_another_one_goes_on(
    user_run: MarkedRun,
) -> None:
    write_tests(user_run, "1x2", "2x1", tests=KILLS_ITS_WORKER + TRAINS)
    words = ("-n", "1", f"--basetemp={user_run.folder / 'xdist'}")
    code, text = run(user_run.folder, *words, more=user_run.environment, own_processes=True)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert re.search(r"worker 'gw\d' crashed while running 'test_training.py::test_killed'", text)
    assert "1 failed, 2 passed" in text
    assert not user_run.left_behind()


ENDS_THE_SERVER = """
def test_ends_the_server():
    server = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server._forkserver_address)
    os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
"""


def test_ranks_start_again_after_the_fork_server_has_failed(user_run: MarkedRun) -> None:
    """The server fails when a client asks for a process and closes the connection at once."""
    write_tests(user_run, "1x2", tests=ENDS_THE_SERVER + TRAINS)
    code, text = run(user_run.folder, more=user_run.environment, own_processes=True)
    assert code == 0, text
    assert "EOFError" in text
    assert not user_run.left_behind()
