"""The text of every script. ``export`` fills in the case, and leaves sections out that it does not
need. Nothing in this package runs this file.
"""

from __future__ import annotations

import atexit
import copy
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

Gradients = Mapping[str, Tensor | None]
Batch = Any

# [constants
NODE_OF_RANK: tuple[int, ...] = (0,)
BACKEND: str | None = None
SEED, SEED_DISTANCE, BATCH_SEED, GENERATOR_SEED = 0, 0, 0, 0
DTYPE: torch.dtype | None = torch.float64
EXACT = False
LEARNING_RATE = 0.1
COMPARES_UPDATE, STEP_TRAINS = False, False
BATCH_DIM = 0
BATCH_LEAVES: dict[str, int | None] = {}
BIG_BATCHES: list[Sequence[int]] = []
SHARDS: list[list[Sequence[int]]] = []
CASE_RANKS_BY_NODE: list[tuple[int, ...]] = []
CASE_SHARDS: list[list[Sequence[int]]] = []
UNUSED_PARAMETERS = False
FILES: dict[str, str] = {}
STANDS_FOR: tuple[str, ...] = ()
PROVIDED: tuple[str, ...] = ()
# constants]

# [stand_ins
# The files import names of the package that wrote this script. They get the ones below.


@dataclass(frozen=True, kw_only=True)
class Case:
    """The case as the files describe it."""

    model: Any
    loss: Any = None
    batch: Any = None
    layout: str = "1x2"
    shards: str = "equal"
    dtype: torch.dtype | None = torch.float64
    seed: int = 0
    examples: int | None = None
    exact: bool = False
    batch_dims: Any = field(default=None, hash=False)


class NotHere(Exception):
    """A name of the package that files may import, but that this script cannot call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} of ddp_equivalence is not part of this script")


class StandIn(ModuleType):
    """Stands for a module of the package."""

    def __getattr__(self, name: str) -> Any:
        file = f"{self.__name__}.{name}".replace(".", "/") + ".py"
        if name.startswith("__") or file in FILES:
            raise AttributeError(name)
        return globals()[name] if name in PROVIDED else type(name, (NotHere,), {})


# stand_ins]


@dataclass(frozen=True, eq=False)
class Rank(int):
    """The third argument of the step. It is also the number ``rank``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str

    def __new__(cls, rank: int, *_: Any, **__: Any) -> Rank:
        return super().__new__(cls, rank)

    def __str__(self) -> str:
        return str(self.rank)

    def read(self, indices: Any) -> None:
        """Nothing is recorded in this script."""


def join_process_group() -> Rank:
    """Join, on a node that is simulated on this host and sees its own GPUs if there are enough."""
    if "RANK" not in os.environ:
        print(__doc__)
        sys.exit(2)
    rank, world_size, nodes = int(os.environ["RANK"]), len(NODE_OF_RANK), len(set(NODE_OF_RANK))
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise SystemExit(f"this script needs --nproc-per-node {world_size}")
    node = NODE_OF_RANK[rank]
    ranks_of_node = [other for other in range(world_size) if NODE_OF_RANK[other] == node]
    local_rank, gpus = ranks_of_node.index(rank), torch.cuda.device_count()
    backend = BACKEND or (("nccl" if gpus >= world_size else "nccl_shared") if gpus else "gloo")
    if gpus < (needed := {"gloo": 0, "gloo_cuda": 1, "nccl_shared": 1}.get(backend, world_size)):
        raise SystemExit(f"this script runs on {backend} and needs {needed} GPUs, found {gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    if backend == "gloo":
        visible = ""
    elif world_size > 1:
        visible = ",".join(dict.fromkeys(visible.split(",")[r % gpus] for r in ranks_of_node))
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": visible,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks_of_node)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }
    if backend == "nccl_shared":  # NCCL lets ranks share a GPU that say they are on other hosts
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if visible:
        device = torch.device("cuda", local_rank % len(visible.split(",")))
        torch.cuda.set_device(device)
    backend = backend.removesuffix("_cuda").removesuffix("_shared")
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    _keep_group()
    return Rank(rank, world_size, local_rank, len(ranks_of_node), node, nodes, device, backend)


def _keep_group() -> None:
    """From now on, a step that starts or ends its process group gets this one, or none."""
    world: Any = dist.group.WORLD

    def start(*_: Any, **__: Any) -> None:
        dist.GroupMember.WORLD = world

    def end(group: Any = None) -> None:
        if group in (None, world):
            dist.GroupMember.WORLD = None

    dist.init_process_group, dist.destroy_process_group = start, end


# [enclosed
import textwrap
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType


def function_in(module: ModuleType, name: str, line: int, number: int = 0) -> FunctionType:
    """The function that another function makes in this line; ``number``: of several lambdas."""

    def all_in(code: CodeType) -> Iterator[CodeType]:
        for part in code.co_consts:
            if isinstance(part, CodeType):
                yield part
                yield from all_in(part)

    path = Path(str(module.__file__))
    whole = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    found = [
        each for each in all_in(whole) if (each.co_qualname, each.co_firstlineno) == (name, line)
    ]
    code = found[number]
    return FunctionType(code, vars(module), closure=tuple(CellType() for _ in code.co_freevars))


def enclose(function: FunctionType, defaults: Any, keyword: Any, /, **values: Any) -> None:
    """Give the function its default arguments, and the values from the functions around it."""
    function.__defaults__, function.__kwdefaults__ = defaults, keyword
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        cell.cell_contents = values[name]


def class_in(module: ModuleType, name: str, first: int, last: int, /, **values: Any) -> Any:
    """The class that a function defines in these lines, with values from that function."""
    path, names = Path(str(module.__file__)), {**vars(module), **values}
    text = textwrap.dedent(
        "\n".join(path.read_text(encoding="utf-8").splitlines()[first - 1 : last])
    )
    flags = annotations.compiler_flag
    exec(compile("\n" * (first - 1) + text, str(path), "exec", flags, dont_inherit=True), names)
    return names[name]


# enclosed]
# [strategy
import functools
from types import SimpleNamespace

from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

# The step is a strategy from the catalogue of the package that wrote this script.
TrainStep = Indices = ShardedBatch = Any
Strategy = SimpleNamespace
LOSSES: dict[str | None, Any] = {}
process_state = SimpleNamespace(keep_group=lambda group: None)


def catalogue_loss_of(case: Any, needed_by: str) -> Any:
    return LOSSES[case.loss]


def count_examples(batch: Batch) -> int:
    return len(tensors_of(batch)[0])


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda leaf: found.append(leaf), batch)
    return found


def concatenate(outputs: Sequence[Any]) -> Any:
    """Join what several replicas returned along dim 0."""
    leaves, spec = zip(*map(pytree.tree_flatten, outputs), strict=True)
    return pytree.tree_unflatten([torch.cat(parts) for parts in zip(*leaves, strict=True)], spec[0])


class Layout:
    """The ranks of every node of the case."""

    nodes = len(CASE_RANKS_BY_NODE)
    world_size = sum(map(len, CASE_RANKS_BY_NODE))
    ranks_on = CASE_RANKS_BY_NODE.__getitem__


class Task:
    """The argument of a strategy on a rank."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank
        self.notes: dict[str, Any] = {}
        self.lr, self.may_leave_parameters_unused = LEARNING_RATE, UNUSED_PARAMETERS
        self.case = SimpleNamespace(loss=next(iter(LOSSES), None), ranks=Layout())
        self.shards = [
            SimpleNamespace(indices=shards, sizes=tuple(map(len, shards))) for shards in CASE_SHARDS
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def wrap(self, model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        devices = [self.rank.device] if self.rank.device.type == "cuda" else None
        return DistributedDataParallel(
            self.model if model is None else model,
            device_ids=devices,
            find_unused_parameters=UNUSED_PARAMETERS,
            **options,
        )


@functools.cache
def prepared(model: nn.Module, rank: Rank) -> Callable[[Batch], Gradients | None]:
    """The strategy is prepared once for all steps, since it may wrap the model."""
    return STRATEGY.prepare(Task(model, rank))  # type: ignore[no-any-return]


def step_of_strategy(model: nn.Module, shard: Batch, rank: Rank) -> Gradients | None:
    returned = prepared(model, rank)(shard)
    if COMPARES_UPDATE and getattr(STRATEGY, "trains", False):
        model.zero_grad()  # it has stepped already
    return returned


# strategy]
def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def map_tensors(change: Callable[[Tensor], Any], batch: Batch, replaced: Any = None) -> Batch:
    """A copy of the batch, whatever its containers are, with ``change(tensor)`` for each tensor.

    ``replaced``: what takes the place of other parts of the batch, by their id.
    """
    with patch.object(Tensor, "__deepcopy__", lambda tensor, _: change(tensor)):
        return copy.deepcopy(batch, replaced)


def cast(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a tensor of the batch; floating-point and complex ones in this precision."""
    if dtype and leaf.is_floating_point():
        leaf = leaf.to(dtype)
    elif leaf.is_complex() and dtype in (torch.float32, torch.float64):
        leaf = leaf.to(dtype.to_complex())
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def to_integers(values: Tensor) -> Tensor:
    """The values scaled and rounded to integers from -3 to 3, whose sums are exact."""
    if not values.is_floating_point():
        return values
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * 3).round()


def take(batch: Batch, indices: Sequence[int]) -> Batch:
    """The examples at ``indices``, in that order."""
    if deal is not None:
        return deal(batch, list(indices))
    index = torch.as_tensor(list(indices), dtype=torch.long)

    def part(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        if isinstance(leaf, Tensor):
            taken = leaf.detach().index_select(dim, index.to(leaf.device))
            return taken.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, np.ndarray):
            return leaf.take(index.numpy(), axis=dim)
        return type(leaf)(leaf[place] for place in indices)

    replaced = {}
    for path, dim in BATCH_LEAVES.items():
        leaf = eval(f"batch{path}", {"batch": batch})
        replaced[id(leaf)] = part(leaf, dim)
    return map_tensors(lambda leaf: part(leaf, BATCH_DIM), batch, replaced)


def model_at_start() -> nn.Module:
    """Build the model, which is the same in every process."""
    seed_all(SEED)
    model = build_model().to(DTYPE)
    if EXACT:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(to_integers(parameter))
    return model


def whole_batch() -> Batch:
    """The examples of all steps, on the CPU: the same in every process."""
    seed_all(BATCH_SEED)
    batch = make_batch(torch.Generator().manual_seed(GENERATOR_SEED))
    return map_tensors(lambda leaf: cast(leaf.cpu(), DTYPE), batch)


def big_batches() -> list[Batch]:
    """The big batch of every step."""
    whole = whole_batch()
    batches = [take(whole, examples) for examples in BIG_BATCHES]
    return [map_tensors(to_integers, batch) for batch in batches] if EXACT else batches


def shards_of(rank: Rank) -> list[Batch]:
    """The arguments of the step's calls: a shard of every big batch, or all of them at once."""
    if not STEP_TRAINS:
        by_step = zip(big_batches(), SHARDS, strict=True)
        return [take(batch, shards[rank.rank]) for batch, shards in by_step]
    indices = zip(BIG_BATCHES, SHARDS, strict=True)
    own = [examples[place] for examples, shards in indices for place in shards[rank.rank]]
    return [take(whole_batch(), own)]


def on_one_device(dtype: torch.dtype | None, scale: float = 1.0) -> Gradients:
    """The expected gradients: of the big batches, in one process without any wrapper."""
    model = model_at_start().to(dtype or DTYPE)
    before = copy.deepcopy(dict(model.named_parameters()))
    gradients: dict[str, Tensor | None] = {}
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        batch = map_tensors(lambda leaf: cast(leaf, dtype), batch)
        (scale * loss(model, batch)).backward()
        for name, parameter in model.named_parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / scale
            gradients[name_in_step(name, number)] = parameter.grad
        sgd_step(model)
    return updates(dict(model.named_parameters()), before) if COMPARES_UPDATE else gradients


def on_this_rank(rank: Rank) -> Gradients:
    """The measured gradients: of the steps on this rank, given the rank's shards."""
    model = model_at_start().to(rank.device)
    own = dict(model.named_parameters())  # the step may rename them
    before = copy.deepcopy(own)
    measured: dict[str, Tensor | None] = {}
    for number, shard in enumerate(shards_of(rank)):
        model.zero_grad()
        seed_all(SEED + 1 + number + rank.rank * SEED_DISTANCE)
        shard = map_tensors(lambda leaf: cast(leaf.to(rank.device), None), shard)
        returned = step(model, shard, rank)
        found = by_own_names(returned, model, own)
        if STEP_TRAINS:
            return updates(found, before)
        if returned is None:
            found = {name: None if one is None else one.grad for name, one in found.items()}
        for name, gradient in found.items():
            measured[name_in_step(name, number)] = None if gradient is None else gradient.clone()
        if returned is not None:
            for name, parameter in own.items():
                parameter.grad = found.get(name)
        if COMPARES_UPDATE or number + 1 < len(BIG_BATCHES):
            sgd_step(model)
    return updates(dict(model.named_parameters()), before) if COMPARES_UPDATE else measured


def name_in_step(name: str, number: int) -> str:
    return f"{name} (step {number + 1})" if len(BIG_BATCHES) > 1 else name


def sgd_step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def updates(weights: Gradients, before: Mapping[str, Tensor]) -> Gradients:
    """How far the weights have moved; None for one that is frozen and has not moved."""
    moved: dict[str, Tensor | None] = {}
    for name, weight in before.items():
        after = weights.get(name)
        if after is not None:
            after = full(after).detach().to(weight.device) - weight.detach()
        frozen = not weight.requires_grad and after is not None and not after.any()
        moved[name] = None if frozen else after
    return moved


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded over ranks."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def by_own_names(
    returned: Gradients | None, model: nn.Module, own: Mapping[str, nn.Parameter]
) -> Gradients:
    """The tensors that the step returned, or else the parameters, under their names from before it.

    The step may have wrapped a part of the model, which renames parameters, or replaced some.
    """
    if returned is None:
        now = dict(model.named_parameters())
        held = {id(parameter) for parameter in now.values()}
        found = {name: one if id(one) in held else now.get(name) for name, one in own.items()}
        return {name: parameter for name, parameter in found.items() if parameter is not None}
    plain = {without_wrappers(name): name for name in own}
    buffers = {without_wrappers(name) for name in model.state_dict()} - plain.keys()
    return {
        name if name in own else plain.get(without_wrappers(name), name): tensor
        for name, tensor in returned.items()
        if without_wrappers(name) not in buffers
    }


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# The smallest limits, in units of eps times the norm of one gradient, and of all together.
LIMITS = {torch.float64: (256, 4), torch.float32: (64, 4)}


Result = tuple[float, str]


def relative(value: float, norm: float) -> float:
    return value / norm if norm else (math.inf if value else 0.0)


def distance(gradient: Tensor, truth: Tensor) -> tuple[float, float]:
    """The norm of the difference, and the largest relative difference of an element."""
    difference = (gradient.double() - truth).abs().nan_to_num(math.inf)
    # The difference of a small element is relative to the mean element.
    scale = truth.abs().clamp(min=truth.norm() / max(1, truth.numel()) ** 0.5)
    elements = torch.where(difference > 0, difference / scale, 0.0)
    return difference.norm().item(), elements.max().item() if elements.numel() else 0.0


def compare(name: str, ranks: list[Gradients], expected: Gradients, rounded: Gradients) -> Result:
    """The error of the worst rank in units of its limit, and the parameter's line in the table.

    ``expected``: the big batch in float64. ``rounded``: the big batch in the dtype of the ranks.
    """
    gradients, truth, nearby = [g.get(name) for g in ranks], expected.get(name), rounded.get(name)
    present = [gradient for gradient in gradients if gradient is not None]
    if all(gradient is None or not gradient.any() for gradient in [truth, *gradients]):
        return 0.0, "no gradient anywhere, or zeros"
    if truth is None or nearby is None or len(present) < len(gradients):
        has = ["none" if gradient is None else "some" for gradient in [truth, *gradients]]
        return math.inf, f"gradients: {has[0]} in the big batch; {' '.join(has[1:])} on the ranks"
    if any((each.shape, each.dtype) != (truth.shape, nearby.dtype) for each in present):
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in present)
        return math.inf, f"{shapes}; not {tuple(truth.shape)} {nearby.dtype}"
    eps, (own, together) = torch.finfo(nearby.dtype).eps, LIMITS.get(nearby.dtype, (8, 1))
    norm = truth.norm().item()
    all_norms = [each.norm().item() for each in expected.values() if each is not None]
    floor = together * eps * math.hypot(*all_norms)
    noise, element_noise = distance(nearby, truth)
    limit = 0.0 if EXACT else max(own * eps * norm, 8 * noise, floor)
    element_floor = relative(floor, norm) * truth.numel() ** 0.5
    element_limit = 0.0 if EXACT else max(8 * own * eps, 8 * element_noise, element_floor)
    errors, elements = zip(*(distance(each, truth) for each in present), strict=True)
    limits_away = max(relative(max(errors), limit), relative(max(elements), element_limit))
    relative_errors = " ".join(f"{relative(error, norm):.1e}" for error in errors)
    ratios = " ".join(f"{relative(each.double().norm().item(), norm):.3f}" for each in present)
    line = f"{relative(limit, norm):.1e}  {relative_errors} | {ratios}"
    if any(not torch.equal(each, present[0]) for each in present):
        return max(limits_away, math.nextafter(1, 2)), f"{line}  the bits differ between ranks"
    return limits_away, line


def print_table(results: dict[str, Result]) -> bool:
    """Print a line for every parameter, the worst (in six digits) first; True if any differs."""
    worst_first = sorted(results, key=lambda name: -float(f"{results[name][0]:.6g}"))
    width = max(map(len, results))
    print(f"{'parameter':{width}}    limit  relative error by rank | ratio of norms by rank")
    for name in worst_first:
        print(f"{name:{width}}  {results[name][1]}")
    wrong = sum(limits_away > 1 for limits_away, _ in results.values())
    if wrong:
        print(f"different: {wrong} of {len(results)} parameters, the worst is {worst_first[0]}")
    else:
        print(f"same: {len(results)} of {len(results)} parameters agree with one big batch")
    sys.stdout.flush()
    return wrong > 0


def on_cpu(gradients: Gradients) -> Gradients:
    return {
        name: None if one is None else full(one.detach()).to_dense().cpu()
        for name, one in gradients.items()
    }


def main(rank: Rank) -> None:
    """Rank 0 compares and prints; every rank exits with the result of rank 0."""
    cpu_group = dist.new_group(backend="gloo")
    compares = rank.rank == 0
    expected = on_cpu(on_one_device(torch.float64)) if compares else {}
    # The loss is scaled by 3 and the gradients are divided by 3: only the rounding changes.
    rounded = on_cpu(on_one_device(None, scale=3.0)) if compares else {}
    measured = on_cpu(on_this_rank(rank))
    dist.init_process_group()  # the step may have ended it
    ranks: list[Any] | None = [None] * rank.world_size if compares else None
    dist.gather_object(measured, ranks, group=cpu_group)
    different = [False]
    if ranks is not None:
        names = dict.fromkeys([*expected, *(name for gradients in ranks for name in gradients)])
        results = {name: compare(name, ranks, expected, rounded) for name in names}
        different = [print_table(results)]
    dist.broadcast_object_list(different, group=cpu_group)
    sys.stdout.flush()
    shutil.rmtree(FOLDER)
    # Exit at once, since destroying a process group may wait for another rank.
    os._exit(int(different[0]))


def unpack(files: Mapping[str, str]) -> str:
    """Write the files to a new folder, from which they can be imported."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in files.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text[1:], encoding="utf-8")
    sys.path.insert(0, folder)
    return folder


# The files may ask for the process group when they are imported.
THIS_RANK = join_process_group() if __name__ == "__main__" else None

FOLDER = unpack(FILES)
# [stand_ins
for module in STANDS_FOR:
    sys.modules[module] = StandIn(module)
    sys.modules[module].__path__ = [str(Path(FOLDER, *module.split(".")))]
# stand_ins]
# [bindings
build_model: Callable[..., nn.Module] = nn.Identity
loss: Callable[..., Tensor] = torch.sum
make_batch: Any = None
step: Any = None
deal: Any = None
STRATEGY: Any = None
# bindings]

if THIS_RANK is not None:
    main(THIS_RANK)
