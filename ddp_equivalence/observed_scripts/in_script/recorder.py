"""Records what one rank of an observed script does, up to a few steps of its optimizers."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.in_script.around import after
from ddp_equivalence.observed_scripts.in_script.closer_look import CloserLook
from ddp_equivalence.observed_scripts.in_script.draws import generator_states
from ddp_equivalence.observed_scripts.in_script.kept_tensors import (
    ModuleNames,
    class_that_keeps,
    named_tensors,
    place_of_caller,
    unwrapped,
    whole,
)
from ddp_equivalence.observed_scripts.in_script.loaders import FetchedBatches, digest
from ddp_equivalence.observed_scripts.in_script.script_changes import batch_in_float64
from ddp_equivalence.observed_scripts.in_script.watch import Watch, end_process
from ddp_equivalence.observed_scripts.queries import Instructions
from ddp_equivalence.observed_scripts.record import (
    Event,
    LastLine,
    Step,
    path_of_step,
    rank_folder,
    write_whole,
)
from ddp_equivalence.observed_scripts.rows import rows_of

MOST_TIMES_WANTED = 4
"""At most so many times the steps that are wanted are recorded, where batches are read rarely."""

WAIT_FOR_OTHERS, PATIENCE = 120.0, 10.0
"""Seconds that a rank which is done waits for the others, and for those that have made a step."""


class Recorder(Watch):
    """``instructions``: where to write, and how many steps to record."""

    def __init__(self, instructions: Instructions) -> None:
        super().__init__()
        self._options, self._all_ranks = instructions.options, instructions.folder
        self.float64 = instructions.float64
        self._written, self._earlier_steps, self._done_at = 0, 0, math.inf
        self._complete: Step | None = None
        self._fetched = FetchedBatches()
        self._last_lines = LastLines()
        self._look = None if instructions.look_at is None else CloserLook(instructions.look_at)

    # --- steps

    @property
    def keeps_tensors(self) -> bool:
        """False before the first step that is to be recorded: a warm-up may have many steps."""
        return self._earlier_steps >= self._options.from_step

    def ends_step(self, optimizer: Any) -> None:
        """Write the step; again, if another optimizer steps with the same gradients."""
        self._complete = self.now
        self._end_look(self.now.held)
        if self.keeps_tensors:
            self._write(optimizer)
        else:
            self._fetched.step_ends()
        if self._look is not None:
            self._look.set_up_ends()

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Keep the gradients that are there before the step has gone backward."""
        super().before_backward(roots)
        if len(self.now.losses) == 1 and self.keeps_tensors:
            self.now.stale = {
                name: whole(parameter.grad)
                for name, parameter in self.names.live_parameters()
                if parameter.grad is not None and bool(parameter.grad.any())
            }

    def before_clip(self) -> None:
        """Keep the gradients; what happens to them from here on is not looked at closely."""
        super().before_clip()
        look = self._look
        if look is not None and len(self.now.losses) >= look.look_at.clipped_after > 0:
            self._end_look(self.now.before_clip or {})

    def _end_look(self, gradients: Mapping[str, Tensor | None]) -> None:
        if self._look is not None and self._look.is_open:
            self._look.end(gradients, self.now.scales, self._folder)

    def goes_on(self) -> None:
        """Begin the next step; end the process when all have been written."""
        if self._complete is None:
            self._finish_if_done()
            return
        self._complete = None
        if self.keeps_tensors:
            self._written += 1
        self._earlier_steps += 1
        self._fetched.step_begins()
        self.now = Step()
        self.now.generators[Event("start")] = generator_states()
        self._finish_if_done()

    def _finish_if_done(self, fetching: bool = False) -> None:
        """End the process when all steps have been written, by all ranks.

        Steps that follow without another batch belong to the last one that is wanted. A rank that
        is behind may need what this one does next.
        """
        reads_once = not fetching and self._fetched.training
        if self._written < self._options.steps * (MOST_TIMES_WANTED if reads_once else 1):
            return
        (self._folder / "done").touch()
        self._done_at = min(self._done_at, time.monotonic())
        others = [rank_folder(self._all_ranks, rank) for rank in range(world_size())]
        while not all((one / "done").exists() for one in others):
            waited = time.monotonic() - self._done_at
            if waited > PATIENCE and all(path_of_step(one, 0).exists() for one in others):
                return
            if waited > WAIT_FOR_OTHERS:
                break
            time.sleep(0.01)
        end_process()

    def step_was_skipped(self) -> None:
        """Forget what was computed for it."""
        super().step_was_skipped()
        self._fetched.step_was_skipped()

    @property
    def _folder(self) -> Path:
        folder = rank_folder(self._all_ranks, rank_of_process())
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "run.pt", facts_of_process(folder))
        return folder

    # --- what a step reads

    def batches_of(self, loader: Any, iterator: Any) -> Iterator[Any]:
        """The loader's own batches, remembered until the model has been called with them."""
        number = self.loaders.begins(loader)
        while True:
            self.note_draws()
            self._fetched.reads_on(number)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.note_draws(by_the_script=False)
            if self.float64:
                batch = batch_in_float64(batch)
            self.goes_on()
            self._finish_if_done(fetching=True)
            self._fetched.add(number, rows_of(batch).changed(whole))
            self.was_read(number)
            yield batch

    def given(self, loader: int) -> None:
        """Note it, with the state of the generator."""
        if self._look is not None and self._is_looked_at:
            self._look.gets_batch()
        self._fetched.give(loader)

    def fed(self, name: str, arguments: Any, named: Any) -> tuple[Any, Any]:
        """Note which batches the module is called with; look closer, if that is wanted."""
        _ = world_size() > 1 and self._folder  # from now on, this rank says where it hangs
        look = self._look
        if look is not None and look.look_at.module == name and self._is_looked_at:
            look.begin(rank_of_process(), self.names.modules[name], self)
        self._fetched.trained_with((arguments, named))
        return arguments, named

    def not_trained(self, arguments: Any, named: Any) -> None:
        """The module is called in an evaluation."""
        self._fetched.evaluated_with((arguments, named))

    @property
    def _is_looked_at(self) -> bool:
        """The step in progress is the one to look at closely."""
        return self._earlier_steps == self._options.from_step and self._complete is None

    def enters(self, name: str, module: nn.Module) -> None:
        """Keep what the module holds; the other ranks keep digests, to tell whether it is equal."""
        is_first = rank_of_process() == 0
        for inner, tensor in named_tensors(module) if self.keeps_tensors else ():
            is_dense = tensor.layout is torch.strided and not hasattr(tensor, "full_tensor")
            is_plain = is_dense and not is_first
            value = tensor if is_plain else whole(tensor)
            self.now.weights[f"{name}:{inner}"] = digest(value)
            if is_first:
                self.now.states[f"{name}:{inner}"] = value

    def draws_like_the_record(self, event: Event) -> None:
        """Keep the state of the generator."""
        self.now.generators[event] = generator_states()

    # --- writing

    def _write(self, optimizer: Any) -> None:
        self._fetched.step_ends()
        self.now.steps_with |= dict(what_it_steps_with(optimizer, self.names))
        fetched = self._fetched.of_step
        loader = self.loaders.begun[fetched[0].loader] if fetched else None
        of_batches = {
            Event("batch", number=place): one.generator
            for place, one in enumerate(fetched)
            if one.generator is not None
        }
        self.write(
            path_of_step(self._folder, self._written),
            number=self._written,
            used=self._fetched.used,
            batches=[one.rows for one in fetched],
            loaders=tuple(self._fetched.loaders),
            generators=self.now.generators | of_batches,
            last_lines=self._last_lines.of_step(optimizer, loader, self.names),
            buffers_kept={
                full: class_that_keeps(self.names.modules[name], buffer)
                for full, _ in self.names.buffers(self.names.modules)
                for name, _, buffer in [full.partition(":")]
            },
            epoch=self.loaders.epoch_of(loader),
            planted=None if self.planted is None else self.planted.fired,
        )


# Remembers which line last made or changed what a script trains with.

SCHEDULERS = [one for one in vars(lr_scheduler).values() if "step" in getattr(one, "__dict__", ())]

CHANGING = (
    *((LastLine.MADE, kind, "__init__") for kind in (Optimizer, DataLoader)),
    *((LastLine.LOADED, kind, "load_state_dict") for kind in (Optimizer, nn.Module)),
    *((LastLine.CLEARED, kind, "zero_grad") for kind in (Optimizer, nn.Module)),
    *((LastLine.SCHEDULED, kind, "step") for kind in SCHEDULERS),
)
"""The methods by which a script makes and changes such objects."""


class LastLines:
    """Watches from the beginning."""

    def __init__(self) -> None:
        self._lines: dict[tuple[LastLine, int], tuple[weakref.ref[Any], CodeLine | None]] = {}
        for what, kind, method in CHANGING:
            after(kind, method, partial(self._note, what))

    def of_step(self, optimizer: Any, loader: Any, names: ModuleNames) -> dict[Any, CodeLine]:
        """``Step.last_lines`` of the step that ends when this optimizer steps. ``loader``: None if
        it read from none.
        """
        owners = {"optimizer": [optimizer], "loader": [loader]}
        owners |= {name: list(one.modules()) for name, one in names.modules.items()}
        known = {
            (what, owner): line
            for owner, objects in owners.items()
            for what in LastLine
            if (line := next(filter(None, (self._line(what, one) for one in objects)), None))
        }
        self._lines = {key: one for key, one in self._lines.items() if key[0] != LastLine.CLEARED}
        return known

    def _note(self, what: LastLine, one: Any) -> None:
        """Remember which line did this with an object, as long as the object lives. A user's class
        may have made it unhashable.
        """
        about = one.optimizer if what is LastLine.SCHEDULED else one
        about = unwrapped(about) if isinstance(about, nn.Module) else about
        line = place_of_caller(one if what is LastLine.MADE else None)
        self._lines[what, id(about)] = weakref.ref(about), line

    def _line(self, what: LastLine, one: Any) -> CodeLine | None:
        known, line = self._lines.get((what, id(one)), (None, None))
        return line if known is not None and known() is one else None


def what_it_steps_with(optimizer: Any, names: ModuleNames) -> Iterator[tuple[str, str]]:
    """All that decides how an optimizer steps beside its gradients, as names and texts."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for key, value in group.items():
            if isinstance(value, int | float | str | Tensor | tuple):
                yield f"{key} of group {number}", _text(value)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                if not hasattr(value, "full_tensor"):  # a shard differs between ranks
                    yield f"{key} of {names.of_parameter(parameter)}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest(value) if value.numel() > 1 else f"{value.item():.6g}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# Which rank a process of a script is.

STACKS = "stacks.txt"


def rank_of_process() -> int:
    """The rank in the group of all, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks in that group, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def facts_of_process(folder: Path) -> dict[str, Any]:
    """Facts of a rank's process for the process that judges. From now on, it also writes its
    stacks to the rank's folder on SIGUSR1, unless the script uses this signal itself.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, (folder / STACKS).open("w"))
    return {
        "world_size": world_size(),
        "process": os.getpid(),
        "main": str(getattr(sys.modules.get("__main__"), "__file__", "") or ""),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
        "backend": _backend(),
    }


def _backend() -> str:
    """The backend of the group of all for the devices that it trains on; "" without a group.

    A script that names none has one for each kind of device, such as ``cpu:gloo,cuda:nccl``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    config = str(dist.get_backend_config())
    by_device = dict(one.partition(":")[::2] for one in config.split(","))
    device = "cuda" if "cuda" in by_device and torch.cuda.is_available() else "cpu"
    return by_device.get(device) or dist.get_backend()
