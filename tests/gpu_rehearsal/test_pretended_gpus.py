"""The pretended GPUs do what CUDA does, so that what passes on them means something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import PRETENDED, rehearse

PROGRAM = "program"


def run(text: str, folder: Path, **options: object) -> str:
    """The output of a program on two pretended GPUs, which must end well."""
    (folder / f"{PROGRAM}.py").write_text(text)
    rehearsed = rehearse(PROGRAM, folder=folder, **{"gpus": 2, **options})  # type: ignore[arg-type]
    assert rehearsed.returncode == 0, rehearsed.output
    return rehearsed.output


AS_CUDA = """
import os
import pynvml
import torch
import torch.distributed as dist
from torch import nn

def refused(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError(f"{call} was not refused")

pynvml.nvmlInit()
assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count() == 2
assert not torch.cuda.is_initialized()
torch.manual_seed(5)
one = torch.rand(4, device="cuda:1")
handle = pynvml.nvmlDeviceGetHandleByIndex(1)
(process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
assert process.pid == os.getpid()
assert str(torch.cuda.get_device_properties(1).uuid) in pynvml.nvmlDeviceGetUUID(handle)
assert torch.cuda.current_device() == 0 and "rehearsed" in torch.cuda.get_device_name(1)
assert "invalid device ordinal" in refused(torch.cuda.set_device, 2)

# Each device has a generator, and all are seeded with torch.manual_seed.
torch.manual_seed(5)
assert torch.equal(torch.rand(4, device="cuda:1"), one) and not torch.equal(torch.rand(4), one)
torch.cuda.manual_seed(6)
assert not torch.equal(torch.rand(4, device="cuda:1"), one)

# The result of a collective is there when somebody has waited.
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "nccl"
parts = [torch.zeros(3)]
work = dist.all_gather(parts, torch.ones(3), async_op=True)
assert not parts[0].any()
work.wait()
assert parts[0].all()
parts = [torch.zeros(3)]
dist.all_gather(parts, torch.ones(3), async_op=True)
torch.cuda.synchronize()
assert parts[0].all()
assert "dense" in refused(dist.all_reduce, torch.eye(3).to_sparse())

# GradScaler cannot unscale bfloat16.
scaler = torch.amp.GradScaler("cuda")
weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
sgd = torch.optim.SGD([weight])
scaler.scale(weight.sum()).backward()
assert "BFloat16" in refused(scaler.unscale_, sgd)

# The replicas of nn.DataParallel give the gradients of the whole batch.
model, batch = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(7, 4)
model(batch).square().sum().backward()
expected = [one.grad.clone() for one in model.parameters()]
model.zero_grad()
devices = []
model.register_forward_pre_hook(lambda _, inputs: devices.append(str(inputs[0].device)))
nn.DataParallel(model)(batch).square().sum().backward()
assert sorted(devices) == ["cuda:0", "cuda:1"], devices
for parameter, right in zip(model.parameters(), expected, strict=True):
    torch.testing.assert_close(parameter.grad, right)

# A fork cannot use CUDA.
if os.fork() == 0:
    os._exit(int("forked subprocess" not in refused(torch.cuda.init)))
assert os.wait()[1] == 0
print(torch.__version__)
"""


def test_pretended_gpus_do_what_cuda_does(tmp_path: Path) -> None:
    output = run(AS_CUDA, tmp_path, deferred=True)
    assert "REHEARSED on 2 pretended GPUs" in output
    assert "+rehearsed" in output


AS_A_RANK = """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import signal
import threading
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from pretended_gpus import rounding

class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.works = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.name())
        if function.namespace == "c10d":
            self.works.append(result[-1])
        return result

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)

# A synchronous collective has no handle, and a dispatch mode that waits for it ends the process.
with Seen() as seen:
    assert dist.all_reduce(torch.ones(3)) is None
assert dist.Work.unbox(seen.works[0]) is None
child = os.fork()
if child == 0:
    seen.works[0].wait()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
group, options = dist.group.WORLD, dist.AllreduceOptions()
options.asyncOp = False
assert group.allreduce([torch.ones(3)], options) is None
assert dist.all_reduce(torch.ones(3), async_op=True).wait()

# A backward pass runs on another thread, unless autograd may use no other.
threads = []
def hook(gradient):
    threads.append(threading.current_thread() is threading.main_thread())
    return gradient * 2
weight = torch.ones(3, requires_grad=True)
weight.register_hook(hook)
with Seen() as seen:
    weight.square().sum().backward()
assert "aten::mul.Tensor" in seen.names, seen.names
assert weight.grad.tolist() == [4.0] * 3
with torch.autograd.set_multithreading_enabled(False):
    torch.autograd.grad(weight.sum(), [weight])
assert threads == [False, True]
def fails(gradient):
    raise KeyError("in a hook")
weight.register_hook(fails)
try:
    weight.sum().backward()
except KeyError as error:
    assert "in a hook" in str(error)
else:
    raise AssertionError("the error of a hook is lost")

# Products have other last digits than on the CPU.
torch.manual_seed(0)
left, right = torch.randn(7, 60, dtype=torch.float64), torch.randn(60, 5, dtype=torch.float64)
here, on_cpu = left @ right, rounding.on_host(torch.mm)(left, right)
assert not torch.equal(here, on_cpu)
torch.testing.assert_close(here, on_cpu, rtol=1e-12, atol=1e-12)
"""


def test_a_pretended_rank_does_what_a_rank_on_cuda_does(tmp_path: Path) -> None:
    run(AS_A_RANK, tmp_path)


CONTEXTS = """
import os, subprocess, sys, torch
OTHER = [sys.executable, "-c", "from pretended_gpus import contexts; contexts.enter(0)"]
torch.cuda.set_device(0)
for switch in ({"EXCLUSIVE": "1"}, {"CONTEXTS": "1"}, {"LOST": "0@1"}, {"CONTEXTS": "2"}):
    environment = os.environ | {f"PRETEND_{name}": value for name, value in switch.items()}
    done = subprocess.run(OTHER, env=environment, capture_output=True, text=True)
    error = [line for line in done.stderr.splitlines() if "CUDA error" in line]
    print(switch, done.returncode, *error)
os.environ["PRETEND_LOST"] = "0@1"
torch.cuda.synchronize()
"""


def test_a_gpu_may_refuse_another_context(tmp_path: Path) -> None:
    (tmp_path / f"{PROGRAM}.py").write_text(CONTEXTS)
    rehearsed = rehearse(PROGRAM, gpus=2, folder=tmp_path)
    error = "torch.AcceleratorError: CUDA error:"
    busy = "CUDA-capable device(s) is/are busy or unavailable"
    for said in (
        f"{{'EXCLUSIVE': '1'}} 1 {error} {busy}",
        f"{{'CONTEXTS': '1'}} 1 {error} out of memory",
        f"{{'LOST': '0@1'}} 1 {error} unspecified launch failure",
        "{'CONTEXTS': '2'} 0",
    ):
        assert said in rehearsed.output, rehearsed.output
    assert rehearsed.returncode == 1, "the GPU was lost while it was used"
    assert rehearsed.most_contexts() == {0: 2}
    assert rehearsed.initialised_by_no_rank()


STRICT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def refused(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, TypeError) as error:
        return str(error)
    raise AssertionError(f"{call} was not refused")

here, there, host = (torch.randn(3, 4, device=one) for one in ("cuda:0", "cuda:1", "cpu"))
assert (here.device, (here * 2).T.device) == (torch.device("cuda:0"),) * 2
for other in (there, host):
    assert "at least two devices" in refused(torch.add, here, other)
assert (here + torch.tensor(2.0)).is_cuda and here[torch.tensor([0, 2])].is_cuda
assert "can't convert cuda:0" in refused(here.numpy)
assert torch.equal(here.to("cuda:1").cpu(), here.cpu())

model = nn.Linear(4, 2)
parameter, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)
model.cuda(1)
assert parameter is model.weight and parameter.device == there.device
assert "at least two devices" in refused(model, host)
model(there).square().sum().backward()
assert parameter.grad.device == there.device
optimizer.step()

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert "device type cpu" in refused(dist.all_reduce, host)
dist.all_reduce(here)
ddp = DistributedDataParallel(model.cuda(0), device_ids=[0])
ddp(host).square().sum().backward()  # DDP moves what it is given
assert parameter.grad.device == here.device
parallel = nn.DataParallel(nn.Linear(4, 2).cuda(0))
assert parallel(host).device == here.device
"""


def test_in_strict_mode_mixing_devices_raises(tmp_path: Path) -> None:
    run(STRICT, tmp_path, strict=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,9,2", [1]),
        ("1,1", []),
        ("GPU-00000002,0", [2, 0]),
        ("GPU-0000", []),
        ("MIG-00000003-9e4e-0000-0001", [3]),
        ("MIG-00000001,MIG-00000002", []),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_would_show(
    text: str | None, shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PRETENDED))
    monkeypatch.setenv("PRETEND_GPUS", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    from pretended_gpus.visible import visible

    assert visible() == shown


def test_without_the_variable_nothing_is_pretended_and_the_next_sitecustomize_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.of_the_machine = True")
    program = "import sys, torch; print(torch.cuda.is_available(), sys.of_the_machine)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": os.pathsep.join([str(PRETENDED), str(tmp_path)]), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
    assert "REHEARSED" not in done.stderr
