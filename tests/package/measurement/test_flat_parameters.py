"""Torch's module of flat parameters is noticed when it is imported, beside other import watches."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHES = {
    "recorded before other imports are watched": "recorded.__enter__(); watch.start()",
    "recorded after other imports are watched": "watch.start(); recorded.__enter__()",
}

PROGRAM = """
import sys
from ddp_equivalence.measurement.whole_tensors import MODULE, FlatParameters
from ddp_equivalence.ranks.user_modules import ImportWatch
assert MODULE not in sys.modules
recorded, watch = FlatParameters().recorded(), ImportWatch()
{}
from torch.distributed.fsdp._flat_param import FlatParamHandle
assert FlatParamHandle.__init__.__name__ == "__init__"
print(FlatParamHandle.__init__.__code__.co_filename)
recorded.__exit__(None, None, None)
print(FlatParamHandle.__init__.__code__.co_filename)
"""


@pytest.mark.self_check
@pytest.mark.parametrize("order", WATCHES.values(), ids=WATCHES)
def test_flat_parameters_are_recorded_beside_another_watch_of_imports(order: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(order)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    during, afterwards = ran.stdout.split()
    assert during.endswith("whole_tensors.py")
    assert afterwards.endswith("_flat_param.py")
