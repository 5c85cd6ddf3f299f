"""A check works in a child process and in any thread, as in the process that a user starts."""

from __future__ import annotations

import subprocess
import sys

from tests.package.ranks.marked_run import MarkedRun
from tests.package.someone_elses_run import LONGEST, environment

SCRIPT = """
import multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from ddp_equivalence import check
from tests.package.own_cases import own_case, right_step

torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)  # a fork would wait for these threads for ever

def judge(in_process=False, step=right_step, layout="1x2"):
    return check(own_case(layout=layout), step, in_process=in_process).outcome

def takes_long(model, shard, rank):
    right_step(model, shard, rank)
    time.sleep(2)

with multiprocessing.get_context("fork").Pool(1) as pool:
    print("daemonic, before the first check:", pool.apply(judge), flush=True)
print("here:", judge(), judge(in_process=True), flush=True)
# On other ranks than the fork, which must not take the idle ones of its parent.
thread = threading.Thread(target=judge, kwargs={"step": takes_long, "layout": "2x1"})
thread.start()
time.sleep(0.5)
assert thread.is_alive(), "the check ended before the fork"
child = os.fork()  # as pytest --forked does for every test
if child == 0:
    print("while a check runs:", judge(), flush=True)
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1], flush=True)
thread.join()
with ThreadPoolExecutor(4) as executor:
    print("in threads:", *executor.map(judge, [False, True] * 2))
print("here:", judge())
"""

PRINTED = """\
daemonic, before the first check: same
here: same same
while a check runs: same
ended with 0
in threads: same same same same
here: same
"""


def test_a_check_works_in_forks_and_threads_and_leaves_nothing_behind(user_run: MarkedRun) -> None:
    """Each fork starts a fork server of its own."""
    path = user_run.folder / "script.py"
    path.write_text(SCRIPT)
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
    assert done.stdout == PRINTED
    assert done.returncode == 0
    assert user_run.left_behind() == []
