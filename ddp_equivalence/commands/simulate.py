"""``ddp-equivalence simulate``: the rule of a step or of strategies on up to 4,096 ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import (
    DIFFERENT,
    EXIT_CODE_OF_OUTCOME,
    NOT_JUDGED,
    SAME,
)
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.text import plural, range_of_ranks, ratio_text, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.case.layouts import Layout
    from ddp_equivalence.checking.simulated import Held, Simulation
    from ddp_equivalence.ranks.simulated import SimulatedCollective

HELP = "try the rule of a step at up to 4,096 ranks, simulated in one process"

LAYOUT = "128x8"

MOST_GROUPS = 4
"""So many groups of ranks that hold different gradients are printed."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Compare what a step or a strategy leaves on simulated ranks with one big batch: who gets "
        "which examples, what is divided by what, which groups reduce. All ranks are threads of "
        "one process, which take turns and call torch's own DDP, FSDP and collectives. Nothing "
        "here is evidence of a backend. Exit code 0: same, or each strategy as it promises; 1: "
        "different, or some not as they promise; 2: bad input; 3: could not be judged."
    )
    parser.add_argument(
        "target",
        nargs="*",
        metavar="FILE.py[:NAME] | STRATEGY",
        help="a file as for the command check, or names of strategies; default: all strategies "
        "that need no GPU",
    )
    for name, what in (
        ("--layout", f"nodes x ranks per node; default {LAYOUT}, or that of the file's case"),
        ("--shards", "such as equal, uneven, empty or own"),
        ("--model", "with strategies: a model of the catalogue; default mlp"),
        ("--loss", "with strategies: a loss of the catalogue; default mse_mean"),
        ("--compare", "with a file: gradients (the default), or update"),
    ):
        parser.add_argument(name, help=what)
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="the time for one step; default 600"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print what the ranks left, and return the exit code."""
    targets = arguments.target
    if any(".py" in one for one in targets):
        if len(targets) > 1:
            raise BadCase("FILE", " ".join(targets), "one file, or names of strategies")
        return _run_file(arguments)
    return _run_strategies(arguments)


def _run_file(arguments: argparse.Namespace) -> int:
    from ddp_equivalence.commands.check import target
    from ddp_equivalence.commands.user_file import load

    for name in ("model", "loss"):
        if getattr(arguments, name) is not None:
            raise BadCase(name, getattr(arguments, name), "left out: the file's case has its own")
    path, name = target(arguments.target[0])
    start_early()
    found = load(path, name)
    changes = {
        key: value for key in ("layout", "shards") if (value := getattr(arguments, key)) is not None
    }
    options = dict(found.options)
    for key in ("compare", "deadline"):
        if getattr(arguments, key) is not None:
            options[key] = getattr(arguments, key)
    from ddp_equivalence.checking.simulated import simulate

    simulation = simulate(replace(found.case, **changes), found.step, **options)
    print("\n".join(report_lines(simulation)))
    return EXIT_CODE_OF_OUTCOME[simulation.outcome]


def _run_strategies(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        raise BadCase(
            "compare", arguments.compare, "left out: each strategy is compared as its promise says"
        )
    start_early()
    from ddp_equivalence.case.errors import one_of
    from ddp_equivalence.case.layouts import parse
    from ddp_equivalence.checking.simulated import simulate, why_not_simulated
    from ddp_equivalence.strategies import STRATEGIES
    from ddp_equivalence.strategies.catalogue import case_of

    for name in arguments.target:
        if name not in STRATEGIES:
            raise BadCase("STRATEGY", name, one_of(STRATEGIES, name))
    every = [name for name, one in STRATEGIES.items() if not why_not_simulated(one)]
    model, loss = arguments.model or "mlp", arguments.loss or "mse_mean"
    layout, shards = arguments.layout or LAYOUT, arguments.shards or "equal"
    kept, judged, rows = True, True, [("strategy", "left on the ranks", "promised", "seconds")]
    for name in arguments.target or every:
        try:
            case = case_of(STRATEGIES[name], model, loss, layout, shards)
            found = simulate(case, name, deadline=arguments.deadline)
        except BadCase as error:
            if arguments.target:
                raise
            rows.append((name, f"not tried: {error}", "", ""))
            continue
        if len(arguments.target) == 1:
            print("\n".join(report_lines(found)))
        judged, kept = judged and not found.failure, kept and found.keeps_promise
        rows.append((name, _summary(found), found.promised or "same", f"{found.seconds:.1f}"))
    if len(arguments.target) != 1:
        head = f"{model}, {loss}, {shards} shards"
        print("\n".join((_ranks_of(parse(layout)), head, "", *_table(rows))))
    return NOT_JUDGED if not judged else SAME if kept else DIFFERENT


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join((*cells, row[-1].rjust(widths[-1]))).rstrip()


# What is printed of one simulation.


def report_lines(simulation: Simulation) -> Iterator[str]:
    """The lines that say what simulated ranks hold, read and issue."""
    yield from wrapped(f"{simulation.subject}: {_summary(simulation)}", "")
    if simulation.promised is not None:
        yield f"  promised: different, {simulation.promised}"
    yield from (f"  {line}" for line in _head(simulation.case))
    if simulation.failure:
        yield from ("", *simulation.failure.rstrip().splitlines()[1:])
        return
    yield from _held_lines(simulation)
    yield from wrapped(f"examples: {_reads(simulation)}", "  ")
    yield "  collectives of the step:"
    for line in _collectives(simulation.collectives, simulation.case.ranks):
        yield from wrapped(line, "    ")
    yield f"  in {simulation.seconds:.1f} s"


def _held_lines(simulation: Simulation) -> Iterator[str]:
    """What the ranks hold, those together of which the same is said."""
    comparison = simulation.comparison
    if comparison is None or comparison.only_bits_differ or comparison.structure:
        return
    said: dict[str, list[int]] = {}
    for held in simulation.held:
        said.setdefault(_of(held, simulation), []).extend(held.ranks)
    for text, ranks in list(said.items())[:MOST_GROUPS]:
        yield from wrapped(f"{_ranks(sorted(ranks), simulation)}: {text}", "  ")
    if len(said) > MOST_GROUPS:
        yield f"  and {len(said) - MOST_GROUPS:,} more groups of ranks"


def _head(case: Any) -> list[str]:
    return [_ranks_of(case.ranks), f"case {case}"]


def _ranks_of(ranks: Layout) -> str:
    return (
        f"{ranks}: {ranks.world_size:,} {plural(ranks.world_size, 'rank')} on {ranks.nodes:,} "
        f"{plural(ranks.nodes, 'node')}, SIMULATED by threads of one process; no backend was tried"
    )


def _summary(simulation: Simulation) -> str:
    if simulation.failure:
        return f"unknown: {simulation.failure.splitlines()[0]}"
    comparison = simulation.comparison
    assert comparison is not None
    worst = comparison.worst
    error = "" if worst is None else f", error {worst.error:.1e}"
    if simulation.outcome == "same":
        return f"same{error}"
    if comparison.only_bits_differ:
        return "different: every rank is right, but ranks hold other bits and would drift apart"
    if comparison.structure:
        return f"different: {comparison.structure[0]}"
    held = simulation.held
    if len(held) == 1 and held[0].is_multiple:
        return f"different: {_times(held[0].factor, simulation)}"
    return f"different{error}"


def _ranks(ranks: Sequence[int], simulation: Simulation) -> str:
    if len(ranks) == simulation.case.ranks.world_size:
        return "every rank"
    return range_of_ranks(ranks) + (f" ({len(ranks):,})" if len(ranks) > 1 else "")


def _of(held: Held, simulation: Simulation) -> str:
    """What a group of ranks holds: a multiple of the big batch, or the shares of the parts."""
    if math.isnan(held.factor) or math.isnan(held.unexplained):
        return "no finite multiple of the big batch"
    if held.is_multiple:
        return _times(held.factor, simulation)
    if held.shares is None:
        left = f"{held.unexplained:.0%}" if held.unexplained >= 0.005 else f"{held.unexplained:.1e}"
        return f"{ratio_text(held.factor)} times the big batch, and {left} of it is something else"
    shares = ", ".join(_runs(held.shares.of))
    return f"shares by {held.shares.parts}, 1 is as in the big batch: {shares}"


def _runs(shares: Sequence[float]) -> Iterator[str]:
    """The shares in their order, equal neighbours together; at most 12 of them."""
    runs: list[tuple[str, int]] = []
    for share in shares:
        text = ratio_text(0.0 if abs(share) < 1e-9 else share)
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    for text, count in runs[:12]:
        yield text if count == 1 else f"{text} ({count:,} in a row)"
    if len(runs) > 12:
        low, high = min(shares), max(shares)
        yield f"... (from {ratio_text(low)} to {ratio_text(high)})"


def _times(factor: float, simulation: Simulation) -> str:
    """The factor, and which number of the layout it is."""
    ranks = simulation.case.ranks
    numbers = {"ranks": ranks.world_size}
    if ranks.nodes > 1:
        numbers["nodes"] = ranks.nodes
        if ranks.has_even_nodes:
            numbers["ranks of a node"] = ranks.world_size // ranks.nodes
    which = [
        f"the number of {name}" if power == 1 else f"1 / the number of {name}"
        for name, number in numbers.items()
        for power in (1, -1)
        if number > 1 and math.isclose(factor, number**power, rel_tol=1e-6)
    ]
    of = f" ({' or '.join(which)})" if which else ""
    return f"{ratio_text(factor)} times the big batch{of}"


def _reads(simulation: Simulation) -> str:
    reads = simulation.reads
    if reads is None:
        return "it is not known which ones the ranks computed with"
    counts: dict[int, int] = {}
    for count in reads:
        counts[count] = counts.get(count, 0) + 1
    if len(counts) == 1:
        (count,) = counts
        return f"each of the {len(reads):,} on {count:,} {plural(count, 'rank')}"
    return ", ".join(
        f"{examples:,} of {len(reads):,} on {f'{count:,}' if count else 'no'} "
        f"{plural(count, 'rank')}"
        for count, examples in sorted(counts.items())
    )


def _collectives(issued: Mapping[SimulatedCollective, int], layout: Layout) -> Iterator[str]:
    """One line for each kind of collective and each division of the ranks into groups."""
    nodes = {layout.ranks_on(node) for node in range(layout.nodes)}
    sends = {one: count for one, count in issued.items() if one.operation == "send"}
    issued = {one: count for one, count in issued.items() if one not in sends}
    divisions: dict[tuple[str, str], dict[tuple[int, ...], list[int]]] = {}
    largest: dict[tuple[str, str], int] = {}
    for one, count in issued.items():
        division = _division(one.ranks, nodes, layout)
        name = f"{one.operation} {one.reduction}".strip()
        groups = divisions.setdefault((name, division), {})
        groups.setdefault(one.ranks, []).append(count)
        largest[name, division] = max(largest.get((name, division), 0), one.elements)
    if sends:
        pairs = len({one.ranks for one in sends})
        messages = sum(sends.values())
        yield f"send: {messages:,} {plural(messages, 'message')}, {pairs:,} {plural(pairs, 'pair')}"
    elif not divisions:
        yield "none"
    for (name, division), groups in divisions.items():
        times = {sum(counts) for counts in groups.values()}
        often = f"{min(times):,}" if len(times) == 1 else f"{min(times):,} to {max(times):,}"
        most = largest[name, division]
        where = _named(division, list(groups), layout)
        yield (
            f"{name} in {where}: {often} {plural(max(times), 'time')}, of at most {most:,} "
            f"{plural(most, 'element')}"
        )


def _division(group: tuple[int, ...], nodes: set[tuple[int, ...]], layout: Layout) -> str:
    """Which groups belong together: "all", "nodes", or those of one size and distance."""
    if len(group) == layout.world_size:
        return "all"
    if group in nodes:
        return "nodes"
    return f"{len(group)}, {group[1] - group[0] if len(group) > 1 else 0}"


def _named(division: str, groups: Sequence[tuple[int, ...]], layout: Layout) -> str:
    if division == "all":
        return "one group of all ranks"
    sizes = " or ".join(f"{size:,}" for size in sorted({len(group) for group in groups}))
    count = f"{len(groups):,} {plural(len(groups), 'group')} of {sizes}"
    if division == "nodes" and len(groups) == layout.nodes:
        return f"{count}, one for each node"
    first = min(groups)
    which = range_of_ranks(first)
    if len(first) > 2 and first[1] - first[0] > 1:
        which = f"ranks {first[0]}, {first[1]} ... {first[-1]}"
    return f"{count}, {which}" if len(groups) == 1 else f"{count}, the first of {which}"
