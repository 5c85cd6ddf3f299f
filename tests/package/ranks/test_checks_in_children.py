"""A check works in a child process and in any thread, as in the process that a user starts.

Each test runs a script. Whatever its processes are, it must leave none of them behind, and no file.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.package.ranks.marked_run import MarkedRun
from tests.package.someone_elses_run import LONGEST, environment

BEGIN = """
import multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from ddp_equivalence import check
from tests.package.own_cases import own_case, right_step

torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)  # a fork would wait for these threads for ever

def judge(in_process=False):
    return check(own_case(), right_step, in_process=in_process).outcome
"""

IN_A_POOL = """
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its workers are daemonic
        print(*pool.map(judge, [False] * 2))
    print(judge())
"""

IN_FORKS = """
print(judge())
for _ in range(2):  # as pytest --forked does for every test
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print(judge(), flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
print(judge())
"""

IN_THREADS = """
with ThreadPoolExecutor(4) as executor:
    print(*executor.map(judge, [False, True] * 2))
print(judge())
"""

FORKED_WHILE_A_CHECK_RUNS = """
thread = threading.Thread(target=judge)
thread.start()
time.sleep(0.5)  # the thread now waits until its ranks have started
assert thread.is_alive(), "the check ended before the fork"
child = os.fork()
if child == 0:
    print(judge(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
thread.join()
print(judge())
"""

SCRIPTS = {
    "daemonic processes": (IN_A_POOL, "same same same"),
    "forks and threads": (
        FORKED_WHILE_A_CHECK_RUNS + IN_FORKS + IN_THREADS,
        "same 0 same " + "same same 0 same 0 same " + "same " * 5,
    ),
}


@pytest.mark.parametrize("where", SCRIPTS)
def test_a_check_works_and_leaves_nothing_behind_in(where: str, user_run: MarkedRun) -> None:
    script, printed = SCRIPTS[where]
    path = user_run.folder / "script.py"
    path.write_text(BEGIN + script)
    done = subprocess.run(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=user_run.folder,
        timeout=LONGEST,
        check=False,
        env=environment(user_run.environment),
    )
    assert done.stdout.split() == printed.split(), done.stdout
    assert done.returncode == 0
    assert user_run.left_behind() == []
