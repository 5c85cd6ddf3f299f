"""Writes an observed step as files that stand alone: tensors, and a script that compares them."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, HELD, OWN, ObservedStep
from ddp_equivalence.observed_scripts.running_script import CannotReplay

SHOW = '''"""Compares the gradients of every rank with those of one process.

It needs torch and safetensors. The gradients, weights and rows beside this file were recorded in a
real run, see about.json.
"""

import json
from pathlib import Path

from safetensors.torch import load_file

here = Path(__file__).parent
about = json.loads((here / "about.json").read_text())
print(about["headline"])
print("ranks:      ", about["command"])
print("one process:", about["one_process"])
expected = load_file(here / "one_process.gradients.safetensors")
for rank in range(about["world_size"]):
    held = load_file(here / f"rank{rank}.gradients.safetensors")
    print(f"rank {rank}:")
    for name, truth in expected.items():
        if name not in held:
            print(f"  {name}: no gradient")
            continue
        truth, value = truth.double(), held[name].double()
        norm = truth.norm().item()
        error = (value - truth).norm().item() / norm if norm else value.norm().item()
        factor = (value * truth).sum().item() / norm**2 if norm else float("nan")
        print(f"  {name}: error {error:.2g}, nearest multiple {factor:.6g}")
'''


def export(step: ObservedStep, folder: Path, headline: str, command: str, one_process: str) -> Path:
    """Write the step to a new folder. Returns the script that shows the difference.

    Raises BadCase if the folder exists already, or the script did not compute the step in one
    process.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise BadCase("export", str(folder), "a path at which nothing is yet")
    try:
        answer = step.answer(step.everything)
    except CannotReplay as error:
        raise BadCase("export", str(folder), f"a step that was replayed; {error}") from error
    folder.mkdir(parents=True)
    save_file(_known(step.weights()), folder / "weights.safetensors")
    truth = {step.short(name): one for name, one in answer.gradients(BEFORE_CLIP).items()}
    save_file(_known(truth), folder / "one_process.gradients.safetensors")
    for rank in range(step.record.world_size):
        reader = step.record.reader(rank, step.number)
        for kind, name in ((BEFORE_CLIP, "gradients"), (HELD, "after_clipping"), (OWN, "own")):
            save_file(_known(step.gradients(rank, kind)), folder / f"rank{rank}.{name}.safetensors")
        read = reader.below("batch/") or reader.below("call/")
        save_file(_known(read), folder / f"rank{rank}.rows.safetensors")
    about = {
        "headline": headline,
        "command": command,
        "one_process": one_process,
        "world_size": step.record.world_size,
        "losses": [list(step.record.step(r, step.number).losses) for r in range(_ranks(step))],
        "losses_in_one_process": list(answer.losses),
    }
    (folder / "about.json").write_text(f"{json.dumps(about, indent=1)}\n")
    script = folder / "compare.py"
    script.write_text(SHOW)
    return script


def _known(tensors: dict[str, Tensor] | dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: one.contiguous() for name, one in tensors.items() if one is not None}


def _ranks(step: ObservedStep) -> int:
    return step.record.world_size
