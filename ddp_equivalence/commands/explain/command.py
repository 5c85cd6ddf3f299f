"""``ddp-equivalence explain``: which learning rate and batch size keep a training the same."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase, on_one_line
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.commands.explain import KnownGood, Setup, explain, setup_like
from ddp_equivalence.commands.explain.explanation import (
    Loss,
    LossFactor,
    Optimizer,
    Parallelism,
    Sampler,
    TokensOver,
    as_data,
)
from ddp_equivalence.commands.explain.presets import PRESETS
from ddp_equivalence.commands.explain.text import summary_text
from ddp_equivalence.commands.output import require_writable_file, write_json
from ddp_equivalence.report.text import width_of

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands

CODE_OF_VERIFICATION = {"agrees": SAME, "differs": DIFFERENT, "unknown": NOT_JUDGED}


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "explain",
        help="say which batch size and learning rate keep training the same, for a setup",
        description="Say how the gradient of a setup compares with one big batch's, which "
        "learning rate follows from one that worked on one device, and how many steps an epoch "
        "has. Exit code 0: done, 2: bad input; with --verify also 1: the ranks found something "
        "else, 3: it could not be judged.",
    )
    _add_setup_options(parser)
    parser.add_argument(
        "--like",
        choices=tuple(PRESETS),
        help="take what this trainer sets for all of the above that is not given; --accumulation "
        "is then its own setting. hf-trainer is that of transformers, nanogpt its train.py",
    )
    parser.add_argument(
        "--known-good",
        metavar="BATCH@LR",
        help="the effective batch (over all GPUs) and the learning rate that worked, with averaged "
        "gradients or on one device, such as 16@0.01",
    )
    parser.add_argument(
        "--known-loss",
        choices=("mean", "sum"),
        help="the reduction of the loss that worked; default mean",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the setup on ranks: check the gradient, and the weights after three steps with "
        "the learning rate that keeps the length of a step; at another batch than the known one "
        "also train a stand-in, which has one weight, with the other learning rates",
    )
    parser.add_argument(
        "--full", action="store_true", help="also print how the answer follows, step by step"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results to this file, as JSON"
    )


def _add_setup_options(parser: argparse.ArgumentParser) -> None:
    _add_batch_options(parser)
    _add_loss_options(parser)
    parser.add_argument(
        "--parallelism",
        choices=get_args(Parallelism),
        help="how the ranks train together; default ddp. hybrid: one process on each node, "
        "DataParallel inside the process and DDP between the nodes. data-parallel-loss-inside: the "
        "replicas return their losses, and you take losses.mean(). all-reduce-sum: an all_reduce "
        "of your own that does not divide",
    )
    parser.add_argument(
        "--examples", type=int, metavar="N", help="the size of the dataset, for steps per epoch"
    )
    parser.add_argument(
        "--drop-last", action="store_true", help="the DataLoader has drop_last=True"
    )
    parser.add_argument(
        "--sampler",
        choices=get_args(Sampler),
        help="how the dataset is dealt to the ranks: by torch's DistributedSampler, the default, "
        "or in full batches, as Accelerate's even_batches does",
    )
    parser.add_argument(
        "--optimizer",
        choices=get_args(Optimizer),
        help="the optimizer; default sgd",
    )
    parser.add_argument(
        "--betas", metavar="B1,B2", help="Adam's betas with the known batch; default 0.9,0.999"
    )


def _add_loss_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loss",
        choices=get_args(Loss),
        help="the reduction of each rank's loss; default mean",
    )
    parser.add_argument(
        "--loss-times",
        metavar="FACTOR",
        help="what you multiply each loss by, beside what a trainer does: a number, world-size, or "
        "one divided by the other, such as world-size or, for a sum over a count of 64, 1/64",
    )
    parser.add_argument(
        "--tokens-over",
        choices=get_args(TokensOver),
        help="the tokens that a token-mean divides by: those of its micro-batch, the default, of "
        "all micro-batches of its rank, or of those of all ranks",
    )


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, metavar="N", help="the number of nodes; default 1")
    parser.add_argument(
        "--ranks-per-node",
        "--gpus-per-node",
        type=_ranks,
        metavar="N",
        help="the ranks on each node, or with data-parallel and hybrid the GPUs that one process "
        "drives; default 1",
    )
    parser.add_argument(
        "--batch",
        type=int,
        required=True,
        metavar="B",
        help="the examples that one process takes for one micro-batch: with DDP the batch of one "
        "rank, with DataParallel the batch that is split over the GPUs",
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        metavar="K",
        help="the micro-batches of one optimizer step; default 1",
    )
    divided = parser.add_mutually_exclusive_group()
    divided.add_argument(
        "--accumulation-divided",
        action="store_true",
        default=None,
        help="the loss of each micro-batch is divided by the number of micro-batches",
    )
    divided.add_argument(
        "--accumulation-not-divided",
        action="store_false",
        dest="accumulation_divided",
        help="the loss of each micro-batch is not divided, so their gradients add up",
    )


def run(arguments: argparse.Namespace) -> int:
    """Explain the setup, verify it with ``--verify``, and return the exit code.

    Raises BadCase for a setup that cannot be right.
    """
    require_writable_file("json", arguments.json)
    explanation = explain(setup_of(arguments))
    with settings.using(settings.replaced(width=width_of(sys.stdout, settings.current().width))):
        text = str(explanation) if arguments.full else summary_text(explanation)
        print(text, end="", flush=True)
        if not arguments.verify:
            write_json("json", arguments.json, as_data(explanation))
            return SAME
        from ddp_equivalence.ranks.server import start_early

        start_early()  # the ranks' server imports torch while this process does
        from ddp_equivalence.commands.explain.verification import verify

        write_json("json", arguments.json, as_data(explanation))  # now, since the ranks may fail
        verification = verify(explanation)
        print(f"\n{verification}", end="")
    write_json(
        "json", arguments.json, as_data(explanation) | {"verification": verification.as_data()}
    )
    return CODE_OF_VERIFICATION[verification.outcome]


def _ranks(text: str) -> int:
    """Raises ArgumentTypeError for what is no whole number, as the sizes of uneven nodes."""
    right = f"{on_one_line(shlex.quote(text))} should be a whole number"
    if re.fullmatch(r"\d{1,5}(\+\d{1,5})+", text):
        total = sum(map(int, text.split("+")))
        right += f"; with DDP nodes make no difference: give --nodes 1 --ranks-per-node {total}"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(right) from None


def _betas(text: str | None) -> tuple[Fraction, Fraction] | None:
    if text is None:
        return None
    words = text.split(",")
    if len(words) != 2 or not all(re.fullmatch(r"0?\.\d{1,9}|0", word) for word in words):
        raise BadCase("betas", text, "two numbers from 0, below 1, such as 0.9,0.95")
    return Fraction(words[0]), Fraction(words[1])


def setup_of(arguments: argparse.Namespace) -> Setup:
    """The setup that the arguments describe. Raises BadCase if they cannot be right."""
    if arguments.known_loss is not None and arguments.known_good is None:
        right = "left out, unless --known-good BATCH@LR is given"
        raise BadCase("known_loss", arguments.known_loss, right)
    good, factor = arguments.known_good, arguments.loss_times
    given: dict[str, Any] = {
        field: getattr(arguments, field)
        for field in (
            *("batch", "nodes", "ranks_per_node", "accumulation", "accumulation_divided"),
            *("loss", "tokens_over", "parallelism", "examples", "optimizer", "sampler"),
        )
    }
    given["betas"] = _betas(arguments.betas)
    given["drop_last"] = arguments.drop_last or None
    given["loss_times"] = None if factor is None else LossFactor.read(factor)
    if good is not None:
        given["known_good"] = KnownGood.read(good, arguments.known_loss or "mean")
    if arguments.like is not None:
        setup = setup_like(arguments.like, **given)
    else:
        setup = Setup(**{field: value for field, value in given.items() if value is not None})
    if arguments.betas is not None and not setup.is_adam:
        right = "left out, unless the optimizer is adam or adamw"
        raise BadCase("betas", arguments.betas, right)
    return setup
