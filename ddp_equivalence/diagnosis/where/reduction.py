"""After which line gradients are not what right code would have made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.of_reduction import (
    lines_of_divisor,
    lines_of_hook_divisors,
    lines_of_no_sync,
    lines_of_sharding,
    lines_that_choose_elements,
    lines_that_choose_groups,
    lines_that_keep_from_reducing,
    lines_that_left_out,
    way_to,
)
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.source import innermost_loop, run_lines
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.where.gradient_path import (
    OWN,
    SAME_WEIGHT,
    SPARE,
    AfterCall,
    Mix,
    Path,
    at,
    done_text,
    line_of,
    lines_only_on,
    mix_text,
    odd_ranks,
    pointed,
    same_mix,
    went_alike,
)
from ddp_equivalence.diagnosis.where.pieces import Pieces
from ddp_equivalence.diagnosis.where.whereabouts import (
    MOST_LINES,
    WhatWasSeen,
    Whereabouts,
    distinct,
    positions_text,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind

# Three questions, in this order: were the gradients right at some time, and which line changed
# them then; after which line are they no mixture of what the ranks computed; and if they are one
# all the time, which ranks or backward passes count in it as they should not.

NOTHING = 1e-9
"""Gradients that are so many times what they should be are zero."""

ROUNDING = 10.0
"""A weight that is so many times the tolerance of a fit, relative to the largest, is not zero."""

MOST_SHOWN = 4


def fault_of_reduction(
    pieces: Pieces, paths: Sequence[Path], weight: float | None
) -> Whereabouts | None:
    """Where the gradients leave the right way; None if none of them does.

    ``weight``: of each piece in what every rank should hold; None if any will do that is the same
    for all.
    """
    wrong = [path for path in paths if not (_is_right(path.held, weight) and path.as_left)]
    differing = pieces.view.measured.differing
    bad = [path for path in wrong if differing.intersection(path.names)] or wrong
    if not bad:
        return None
    search = _Search(pieces, paths, bad, weight)
    found = search.found()
    if found is None:
        return None
    every_wrong = tuple(dict.fromkeys(name for path in bad for name in path.names))
    # Ranks may have computed nothing of others, so that these are right however they are reduced.
    names = tuple(name for name in every_wrong if name in differing) or every_wrong
    ranks = tuple(sorted({path.rank for path in bad}))
    where = ranked(ranks, pieces.view.world_size)
    alike = [
        one
        for path in bad
        if path is search.path or went_alike(path, search.path)
        for one in path.names
        if one in names
    ]
    of_ranks = "" if len(ranks) == pieces.view.world_size else f"This is so on {where}."
    sentence, lines = found.sentence, found.lines
    if len(set(alike)) < len(names):
        others = len(set(alike)) - 1
        which = f"{alike[0]} and {others} more" if others else alike[0]
        sentence = f"For {which}: {sentence}" if sentence else ""
        lines = tuple(
            replace(one, note=f"of {which}: {one.note}") if one.is_fault and one.note else one
            for one in lines
        )
    elif sentence and len(names) < len(pieces.view.parameters.names):
        sentence = f"For {names_text(names)}: {sentence}"
    return replace(
        found,
        lines=lines,
        sentence=" ".join(filter(None, (sentence, of_ranks, _premise(pieces, weight)))),
        parameters=names,
        ranks=found.ranks or ranks,
    )


def _is_right(mix: Mix | None, weight: float | None) -> bool:
    uniform = None if mix is None else mix.uniform
    if not uniform:
        return False
    return weight is None or abs(uniform - weight) <= SAME_WEIGHT * abs(weight)


def _premise(pieces: Pieces, weight: float | None) -> str:
    """That the big batch is the sum of the ranks' own gradients, and not their mean, as usual."""
    if pieces.view.world_size == 1:
        return "What backward computed is right, and what the rank holds in the end is not this."
    if weight is None or abs(weight - 1) > SAME_WEIGHT:
        return ""
    return "The big batch is the sum of what the ranks computed before any reduction."


@dataclass
class _Search:
    """``path``: the wrong gradients of which something is said."""

    pieces: Pieces
    paths: Sequence[Path]
    bad: Sequence[Path]
    weight: float | None

    def __post_init__(self) -> None:
        self.view = self.pieces.view
        self.path = next(filter(self.is_known, self.bad), self.bad[0])

    def found(self) -> Whereabouts | None:
        return (
            self._tensors_beside()
            or self._changed_after_it_was_right()
            or self._no_mixture()
            or self._other_mixture()
        )

    def _text(self, mix: Mix | None) -> str:
        return mix_text(mix, self.pieces, self.path.rank)

    def _holder_after(self, last: AfterCall | None = None) -> int | None:
        """The rank whose own gradient can be called that; None after a collective, which leaves the
        gradient of one rank to others.
        """
        has_joined = last is not None and last.call.collective is not None
        return None if has_joined else self.path.rank

    def is_known(self, path: Path) -> bool:
        """False if too few elements are known to say of what these gradients are a mixture."""
        elements = self.view.parameters.total_of(path.names)
        of_any = path.held is not None or any(one.mix is not None for one in path.states)
        return of_any or elements >= len(self.pieces.all) + SPARE

    def _tensors_beside(self) -> Whereabouts | None:
        """The step returned other tensors than ``.grad`` holds."""
        if self.path.as_left:
            return None
        reductions = self.view.observed.calls.reductions[-2:]
        headline, held = "the step left tensors beside .grad", self._text(self.path.held)
        text = f"The step returned {held}, and this is not what .grad held when the step ended in "
        text += "the second run."
        if self.view.observed.calls.places(Kind.OPTIMIZER_STEP):
            headline = "gradients change inside the optimizer's step"
            text = f"The optimizer's step began with {held}, and the marked lines changed this "
            text += "inside it."
        return Whereabouts(
            "reduction",
            headline,
            text,
            distinct(
                [
                    *(one.pointed(done_text(one.first, self.pieces), True) for one in reductions),
                    *(pointed(one, "the last change of .grad") for one in self.path.states[-1:]),
                ]
            ),
        )

    def _changed_after_it_was_right(self) -> Whereabouts | None:
        states = self.path.states
        met = [n for n, one in enumerate(states) if _is_right(one.mix, self.weight)]
        if not met or met[-1] + 1 >= len(states) or self.view.world_size == 1:
            return None
        right, wrong = states[met[-1]], states[met[-1] + 1]
        what, text = done_text(wrong.call, self.pieces), self._text(wrong.mix)
        return Whereabouts(
            "reduction",
            "right gradients are changed afterwards",
            f"The gradients were {self._text(right.mix)}. Then {what}, and they were {text}.",
            distinct(
                [
                    pointed(right, "they are right after this line"),
                    pointed(wrong, f"{what}; now {text}", is_fault=True),
                    *self._gone_through(wrong.call),
                ]
            ),
            fix="leave the gradients as they were before the marked line."
            if self._were_right_everywhere()
            else "",
            what="right ones changed",
        )

    def _were_right_everywhere(self) -> bool:
        """True if these gradients were right at some time on every rank on which they are wrong."""
        wrong = [one for one in self.bad if set(one.names) & set(self.path.names)]
        return all(any(_is_right(s.mix, self.weight) for s in one.states) for one in wrong)

    def _gone_through(self, call: Call) -> list[PointedLine]:
        """The line that made what the loop around a line goes through."""
        run, way = run_lines(self.view, self.path.rank), way_to(self.view, call)
        link = chosen(gone_through(run, way))
        if link is None or link.line == line_of(call):
            return []
        return [PointedLine(link.line, f"gives {link.name}, from which the loop takes its values")]

    def _no_mixture(self) -> Whereabouts | None:
        """The first line after which gradients are no mixture; one before any reduction comes
        first, since what the others reduce has been spoilt there.
        """
        found: list[tuple[bool, int, Path]] = []
        for path in self.bad:
            if path.held is not None:
                continue  # what was no mixture for a while became one again
            is_known = self.view.parameters.total_of(path.names) >= len(self.pieces.all) + SPARE
            for number, state in enumerate(path.states):
                if state.mix is None and is_known:
                    found.append((_sums(state.call), number, path))
                    break
        if not found:
            return None
        _, number, self.path = min(found, key=lambda one: one[:2])
        path, state = self.path, self.path.states[number]
        before = path.states[number - 1] if number else None
        what, text = done_text(state.call, self.pieces), self._text(state.mix)
        headline, what_was_seen = self._headline_of(state)
        ranks = tuple(
            sorted({one.rank for one in self.bad if _first_other(one, state.call)})
            if state.call.collective is None
            else ()
        )
        was = self._text(before.mix) if before is not None else ""
        where = f", on {ranked(ranks, self.view.world_size)}," if ranks else ""
        alike = [one for one in self.bad if one.names == path.names]
        same = all(
            before is not None
            and len(one.states) > number
            and same_mix(one.states[number - 1].mix, before.mix)
            for one in alike
        )
        first = "First the gradients" if same else f"On rank {path.rank} the gradients first"
        sentence = f"{first} were {was}. Then{where} {what}, and they were {text}."
        return Whereabouts(
            "reduction",
            headline,
            "" if was in ("", OWN) else sentence,  # the note on the line says the rest
            distinct(
                [
                    *lines_only_on(self.view.observed.by_rank, ranks),
                    pointed(before, f"they are {was}")
                    if before is not None and before.call.kind is not Kind.BACKWARD
                    else None,
                    *self._reducing_in(state),
                    pointed(state, f"{what}; now {text}", not self._is_of_fsdp(state)),
                ]
            ),
            ranks=ranks,
            what=what_was_seen,
        )

    def _reducing_in(self, state: AfterCall) -> list[PointedLine]:
        """The line that let FSDP reduce in the backward pass that left this state."""
        return lines_of_sharding(self.view)[:1] if self._is_of_fsdp(state) else []

    def _is_of_fsdp(self, state: AfterCall) -> bool:
        """True if FSDP reduced inside a backward pass: the line that runs it tells nothing."""
        return state.call.kind is Kind.BACKWARD and bool(lines_of_sharding(self.view))

    def _headline_of(self, state: AfterCall) -> tuple[str, WhatWasSeen]:
        collective = state.call.collective
        if collective is None or collective.reduce_op in ("SUM", "AVG"):
            line = line_of(state.call)
            which = f"line {line.number}" if line else "a line"
            return f"{which} leaves no weighted sum of the ranks' gradients", "no weighted sum"
        if collective.reduce_op:
            return f"gradients are reduced with {collective.reduce_op}", "something else"
        return f"{collective.op} leaves other gradients", "something else"

    def _other_mixture(self) -> Whereabouts | None:
        """Which ranks or backward passes count as they should not."""
        mix = self.path.held
        if mix is None:
            return self._some_elements() or self._of(
                "the gradients are no weighted sum of the ranks'", "", []
            )
        weights: dict[int, dict[int, float]] = {}
        for piece, weight in zip(self.pieces.all, mix.weights.tolist(), strict=True):
            weights.setdefault(piece.rank, {})[piece.number] = weight
        most = float(mix.weights.abs().max())
        least = min(ROUNDING * self.pieces.tolerance, SAME_WEIGHT) * most
        ranks = range(self.view.world_size)
        counted = [rank for rank in ranks if _counts(weights.get(rank, {}), least)]
        if most <= NOTHING:
            return self._of("gradients are zero in the end", "", self._all_changes())
        if len(counted) < len(ranks):
            return self._ranks_missing([rank for rank in ranks if rank not in counted])
        by_pass = [one.values() for one in weights.values()]
        if any(max(one) - min(one) > SAME_WEIGHT * most for one in by_pass):
            return self._passes_count_unequally(weights, least)
        each = {rank: sum(one.values()) for rank, one in weights.items()}
        if max(each.values()) - min(each.values()) > SAME_WEIGHT * most:
            return self._ranks_count_unequally(each)
        return self._another_factor(float(mix.weights.mean()))

    def _some_elements(self) -> Whereabouts | None:
        """Some elements of a parameter are right, and all others are not."""
        view = self.view
        if not view.parameters.sample.is_whole:
            return None
        least = self.pieces.tolerance * float(view.expected.abs().max())
        wrong = ((view.measured.by_rank - view.expected).abs() > least).any(0)
        for path in self.bad:
            name, place = path.names[0], view.parameters.places[path.names[0]]
            numbers = wrong[place].nonzero()[:, 0]
            if 0 < len(numbers) < len(wrong[place]):
                break
        else:
            return None
        held = view.measured.by_rank[:, place][:, numbers]
        is_own = bool(((held - self.pieces.own[:, place][:, numbers]).abs() <= least).all())
        what = "each rank's own" if is_own else "wrong"
        what = what if bool((held.abs() > least).any()) else "zero"
        shown, count = positions_text(numbers.tolist()), int(wrong.sum())
        last = f" They are the last {count} of all {len(wrong)} elements."
        return self._of(
            f"elements {shown} of {name} are {what}",
            f"Elements {shown} of {name} are {what}, and its other elements are right."
            f"{last if bool(wrong[-count:].all()) else ''}",
            [*lines_that_choose_elements(view)],
        )

    def _of(
        self,
        headline: str,
        sentence: str,
        lines: Sequence[PointedLine | None],
        fix: str = "",
        ranks: tuple[int, ...] = (),
    ) -> Whereabouts:
        """The lines, and where they name no fault, the last ones that changed these gradients."""
        known = [one for one in lines if one is not None]
        is_vague = not any(one.is_fault for one in known)
        held = [one.held for one in self.bad if one.names == self.path.names]
        alike = all(same_mix(one, self.path.held) for one in held)
        on = "" if alike else f", on rank {self.path.rank}"
        whose = None if alike and len(held) > 1 else self._holder_after(*self.path.states[-1:])
        text = mix_text(self.path.held, self.pieces, whose)
        last = [
            pointed(one, f"after it{self._where(one)}: {mix_text(one.mix, self.pieces, whose)}")
            for one in self.path.states[: -MOST_SHOWN // 2 : -1]
            if not known or one.call.kind is not Kind.BACKWARD or self._is_shared(one)
        ]
        only_there = "" if alike or not sentence else f" That is so on rank {self.path.rank}."
        in_the_end = "" if sentence and any(last) else f"In the end{on} the gradients are {text}."
        return Whereabouts(
            "reduction",
            headline,
            f"{sentence}{only_there} {in_the_end}".strip(),
            distinct([*known, *last]),
            fix=fix,
            ranks=ranks,
            shows_later=is_vague,
        )

    def _where(self, state: AfterCall) -> str:
        """Of which rank a state is, as the end of a clause; "" if others are in the same state."""
        number, mine = self.path.states.index(state), self.path
        alike = [one for one in self.bad if one.names == mine.names and len(one.states) > number]
        is_alike = all(same_mix(one.states[number].mix, state.mix) for one in alike)
        return "" if is_alike else f", on rank {mine.rank}"

    def _good(self) -> Path | None:
        """Right gradients on the same rank, or on another one."""
        good = [one for one in self.paths if one not in self.bad]
        of_rank = [one for one in good if one.rank == self.path.rank]
        return next(iter([*of_rank, *good]), None)

    def _reductions(self, rank: int) -> list[Call]:
        """The calls by which a rank reduces these gradients."""
        return [
            call
            for call in self.view.observed.calls.of(rank)
            if reduces_gradients(call)
            and call.collective is not None
            and set(call.collective.names) & set(self.path.names)
        ]

    def _ranks_missing(self, missing: Sequence[int]) -> Whereabouts:
        """Some ranks' own gradients are missing in the gradients that all ranks hold."""
        own = self.pieces.own[:, self.view.parameters.positions_of(self.path.names)]
        missing = [rank for rank in missing if bool(own[rank].any())] or missing
        lost, who = self._lost_at(missing), ranked(missing, self.view.world_size)
        if lost is None:
            return self._never_in(missing, who)
        left = mix_text(lost.mix, self.pieces, self._holder_after(lost))
        what = f"{done_text(lost.call, self.pieces)}; after it: {left}"
        text = f"{who.capitalize()} had computed a gradient, and the marked line replaced it."
        return self._of("gradients of some ranks are missing", text, [pointed(lost, what, True)])

    def _never_in(self, missing: Sequence[int], who: str) -> Whereabouts:
        """No line was seen to lose the gradients of these ranks."""
        view, path = self.view, self.path
        reduced, calls = self._reductions(path.rank), view.observed.calls
        others = [place for place in calls.reductions if path.rank in place.by_rank]
        made = {frozenset(one.collective.ranks) for one in reduced if one.collective is not None}
        small = [one for one in made if len(one) < view.world_size]
        groups = calls.places(Kind.NEW_GROUP, where=lambda one: frozenset(one.ranks) in small)
        states = {id(one.call) for one in path.states}
        copies = [
            one
            for one in reduced
            if one.collective is not None
            and one.collective.contents is Contents.COPIES_OF_GRADIENTS
            and not one.in_backward
        ]
        when = calls.of(path.rank).index
        written = path.states and copies and when(path.states[-1].call) > when(copies[-1])
        lines: list[PointedLine | None] = [
            *lines_only_on(view.observed.by_rank, missing),
            *self._where_they_part(),
            *(one.pointed("makes this group") for one in groups[:1]),
        ]
        exchanged = [] if reduced else calls.places(Kind.POINT_TO_POINT)[-1:]
        # What a hook is given is no gradient of a parameter yet, nor a copy of one.
        inside = [] if reduced or others else calls.collectives(lambda call, of: call.in_backward)
        if inside:
            lines += [
                *(one.pointed(f"{one.op} in {groups_text(one.groups)}", True) for one in inside),
                *lines_that_choose_groups(view, inside),
            ][-MOST_LINES:]
        elif not reduced and others:
            lines += [
                *lines_that_left_out(view, others[-1]),
                others[-1].pointed(f"reduces others, not {names_text(path.names)}"),
            ]
        elif not reduced:
            loops = (innermost_loop(way_to(view, one.first)) for one in exchanged)
            lines += [at(loop, "exchanges tensors", True) for loop in loops]
            if not self._others_are_reduced():
                lines += [*lines_that_keep_from_reducing(view), *lines_of_no_sync(view)]
        elif copies and not written:
            back = "copy the result back to .grad"
            lines.append(at(line_of(copies[-1]), "reduces a copy of them", True, back))
        lines += [
            at(line_of(one), done_text(one, self.pieces), id(one) in states) for one in reduced[-1:]
        ]
        sent = inside or any(map(self._reductions, range(view.world_size)))
        which = f"the gradient of {names_text(self.path.names)}"
        never = "" if sent else f"No collective that Python issued contained {which}."
        found = self._of(
            "gradients of some ranks are missing",
            f"{never} What {who} computed is not in these gradients.".strip(),
            lines,
            ""
            if reduced or exchanged or inside
            else "reduce them over all ranks, after the last backward pass.",
        )
        return replace(found, what="gradients missing")

    def _lost_at(self, missing: Sequence[int]) -> AfterCall | None:
        """The first state of one of these ranks in which its own gradient no longer counts."""
        for path in self.bad:
            if path.rank in missing and set(path.names) & set(self.path.names):
                for before, after in pairwise(path.states):
                    counted = [self._counts(one, path.rank) for one in (before, after)]
                    if counted == [True, False] and not after.call.clears:
                        return after
        return None

    def _counts(self, state: AfterCall, rank: int) -> bool:
        """True if what this rank computed is in the gradients, which are a mixture."""
        if state.mix is None:
            return False
        own = torch.tensor([piece.rank == rank for piece in self.pieces.all])
        sizes = state.mix.weights.abs()
        return bool((sizes[own] > SAME_WEIGHT * float(sizes.max())).any())

    def _passes_count_unequally(
        self, weights: dict[int, dict[int, float]], least: float
    ) -> Whereabouts | None:
        """Some backward passes stay on their rank, are lost, or count in another weight."""
        path = self.path
        own = weights[path.rank]
        shared = {
            number
            for rank, one in weights.items()
            for number, weight in one.items()
            if rank != path.rank and abs(weight) > least
        }
        of_others = {n for rank, one in weights.items() if rank != path.rank for n in one}
        counted = {number for number, weight in own.items() if abs(weight) > least}
        local = (counted & of_others) - shared  # a pass that no other rank has cannot be shared
        lost = set(own) - shared - counted
        cleared = [
            one
            for one in path.states[:-1]
            if lost and one.mix is not None and not bool(one.mix.weights.any())
        ]
        passes = [n for n, one in enumerate(path.states) if one.call.kind is Kind.BACKWARD]
        between = path.states[passes[0] + 1 : passes[-1]] if len(passes) > 1 else ()
        changes = [
            one
            for one in between
            if one.call.kind is not Kind.BACKWARD and not (cleared or one.call.clears)
        ]
        if lost and not (local or cleared or changes):
            return None  # torch.autograd.grad, for instance, leaves nothing by design
        mixed = [one for one in path.states if local and self._is_shared(one)]
        lines = [
            *(pointed(one, done_text(one.call, self.pieces), True) for one in cleared[:1]),
            *(lines_of_no_sync(self.view) if local or lost else ()),
            *(pointed(one, done_text(one.call, self.pieces), True) for one in changes),
            *(pointed(one, "reduces them before the last pass", True) for one in mixed[:1]),
        ]
        if not local and not lost:
            fix = "change gradients once, after the last backward pass." if changes else ""
            headline = "the backward passes do not count equally"
            return self._of(headline, _counting(weights), lines, fix)
        stayed = f"number {_numbers(local)} stayed on the rank itself" if local else ""
        parts = [stayed, f"number {_numbers(lost)} left nothing" if lost else ""]
        fix = ""
        if local:
            fix = "reduce once, in or after the last backward pass."
        else:
            # Passes at other weights, as in sharpness-aware minimisation, are not to be added up.
            used = {one.weights for one in self.view.observed.by_rank[path.rank].forwards}
            is_seen = any(one.call.clears for one in cleared) and len(used) == 1
            fix = "clear the gradients once, before the first backward pass." if is_seen else ""
        return self._of(
            "not every backward pass is reduced",
            f"Of {len(own)} backward passes of a rank, {', '.join(filter(None, parts))}.",
            lines,
            fix,
        )

    def _others_are_reduced(self) -> bool:
        """True if the rank has other gradients that are reduced: what keeps DDP from reducing would
        keep it from reducing these, too.
        """
        others = (one for one in self.paths if one.rank == self.path.rank and one.states)
        return any(self._is_shared(one.states[-1]) for one in others)

    def _is_shared(self, state: AfterCall) -> bool:
        """True if what other ranks computed is in the gradients by now."""
        if state.mix is None:
            return False
        others = torch.tensor([piece.rank != self.path.rank for piece in self.pieces.all])
        most = float(state.mix.weights.abs().max())
        return bool((state.mix.weights[others].abs() > SAME_WEIGHT * most).any())

    def _ranks_count_unequally(self, each: Mapping[int, float]) -> Whereabouts:
        """The ranks' own gradients have different weights. ``each``: by rank."""
        sizes = [len(one) for one in self.view.parts.examples_by_rank]
        by_example = {rank: each[rank] / size for rank, size in enumerate(sizes) if size}
        is_apart = len(set(sizes)) > 1 and len(by_example) == len(each)
        if is_apart and len(_by_number(by_example.items())) == 1:
            what = "all examples count equally, with a wrong factor"
            return self._of(what, "", self._all_changes())
        odd = odd_ranks(each)
        apart = lines_only_on(self.view.observed.by_rank, odd)
        lines = [*apart, *self._all_changes(is_fault=not apart)]
        return self._of("the ranks do not count equally", "", lines, ranks=odd)

    def _another_factor(self, weight: float) -> Whereabouts:
        """All ranks count equally, with a wrong weight."""
        good, right = self._good(), self.weight
        if right is None and good is not None and good.held is not None:
            right = good.held.uniform
        parted: list[PointedLine | None] = [*filter(None, self._where_they_part())]
        lines = parted or [*self._hook_divisors(), *self._all_changes()]
        if not parted and self._ends_with_a_mean():  # which is right by itself
            lines = [one and replace(one, is_fault=False) for one in lines]
        here = [one for one in self.bad if one.names == self.path.names]
        held = _by_number((one.rank, one.held.uniform) for one in here if one.held)
        if right and len(held) > 1:
            return Whereabouts(
                "reduction",
                "the ranks hold different multiples of the gradients",
                "What the ranks hold is so many times what it should be: "
                f"{self._numbers_of(held, right)}.",
                distinct(self._own_factors(here) or lines),
            )
        times = "a wrong factor"
        if right:
            times = f"{text_of(weight / right, '.4g')} times the right weight"
        factors = [one.held.uniform if one.held is not None else None for one in self.bad]
        if all(factors) and len(_by_number(enumerate(factors))) == 1:
            found = self._of(f"all ranks count equally, with {times}", "", lines)
            return replace(found, sentence="")
        text = f"All ranks count equally, with {times}."
        return self._of("gradients have wrong factors, not all the same", text, lines)

    def _ends_with_a_mean(self) -> bool:
        """True if the last change divides by the number of ranks, and leaves the ranks' mean."""
        if not self.path.states:
            return False
        last, count = self.path.states[-1], self.view.world_size
        change, uniform = last.call.change, last.mix.uniform if last.mix else None
        factors = (None if change is None else change.factor, uniform)
        return all(isclose((one or 0.0) * count, 1.0, rel_tol=SAME_WEIGHT) for one in factors)

    def _own_factors(self, here: Sequence[Path]) -> list[PointedLine]:
        """The lines that multiply by another number on each rank, and what makes this number."""
        factors: dict[CodeLine, list[tuple[int, float | None]]] = {}
        for path in here:
            for state in path.states:
                change, line = state.call.change, line_of(state.call)
                if change is not None and line is not None:
                    factors.setdefault(line, []).append((path.rank, change.factor))
        found: list[PointedLine] = []
        for line, by_rank in factors.items():
            if len(each := _by_number(by_rank)) > 1:
                note = f"multiplies by {self._numbers_of(each)}"
                shared = self._agreed_in_groups(each.values())
                found += [PointedLine(line, note, is_fault=not shared), *shared]
                found += [] if shared else lines_of_divisor(self.view, self.path.rank, line)
        return found

    def _agreed_in_groups(self, alike: Collection[Sequence[int]]) -> list[PointedLine]:
        """The sum of other numbers than gradients over just these groups of ranks, in which a
        factor is alike.
        """
        groups = {tuple(sorted(one)) for one in alike}
        if max(map(len, groups)) == 1:
            return []
        sums = self.view.observed.calls.collectives(
            lambda call, of: (
                of.op == "all_reduce" and of.contents is Contents.OTHER and not call.in_backward
            )
        )
        note = "adds up in " + groups_text(tuple(sorted(groups))) + " only"
        return [one.pointed(note, True) for one in sums if set(one.groups) == groups][-1:]

    def _numbers_of(self, ranks: Mapping[float, Sequence[int]], unit: float = 1.0) -> str:
        size = self.view.world_size
        each = (f"{text_of(one / unit, '.3g')} on {ranked(on, size)}" for one, on in ranks.items())
        return "; ".join(each)

    def _all_changes(self, *, is_fault: bool = True) -> list[PointedLine | None]:
        """The lines that changed these gradients, or else those that reduced them."""
        changes = [one for one in self.path.states if one.call.change is not None]
        reduced = [one for one in self.path.states if self._is_shared(one)]
        return [
            pointed(one, done_text(one.call, self.pieces), is_fault and not self._is_of_fsdp(one))
            for one in (changes or reduced)[-2:]
        ]

    def _hook_divisors(self) -> list[PointedLine]:
        """The last communication hook, with what it multiplies or divides by."""
        return [
            line
            for place in self.view.observed.calls.places(Kind.HOOK)[-1:]
            for line in (
                *lines_of_hook_divisors(self.view, place),
                PointedLine(place.first.made_at or place.line, "this hook ran in backward"),
            )
        ]

    def _where_they_part(self) -> list[PointedLine | None]:
        """The first line at which wrong gradients part from right ones: of the same rank, or else
        of another one.
        """
        path, good = self.path, self._good()
        if good is None:
            return []
        whose = "other gradients" if path.rank == good.rank else f"on rank {good.rank}"
        unlike = "other gradients" if path.rank == good.rank else f"those of rank {good.rank}"
        for here, there in zip(path.states, good.states, strict=False):
            if line_of(here.call) != line_of(there.call):
                break
            if path.rank == good.rank and not same_mix(here.mix, there.mix):
                now, then = self._text(here.mix), self._text(there.mix)
                note = f"{done_text(here.call, self.pieces)}; {whose}: {then}; these: {now}"
                return [pointed(here, note, is_fault=True)]
        mine = {line for line, _ in path.lines}
        wrong = sorted({one.rank for one in self.bad})
        apart = [] if path.rank == good.rank else lines_only_on(self.view.observed.by_rank, wrong)
        is_open = not apart  # a line that a rank leaves out is right, and what decides this is not
        same = [one for one in self.bad if set(one.names) & set(path.names)]
        elsewhere = {line: one.rank for one in same for line, _ in one.lines}
        theirs = {line for line, _ in good.lines}
        return [
            *apart,
            *(
                pointed(one, f"changes them {whose}, and not on rank {path.rank}", is_open)
                if path.rank != good.rank
                else pointed(one, _not_these(elsewhere.get(line_of(one.call))), True)
                for one in good.states
                if line_of(one.call) not in mine
            ),
            *(
                pointed(one, f"{done_text(one.call, self.pieces)}; not changed: {unlike}", is_open)
                for one in path.states
                if line_of(one.call) not in theirs
            ),
        ]


def _by_number(numbers: Iterable[tuple[int, float | None]]) -> dict[float, list[int]]:
    """Number -> the ranks that have it."""
    ranks: dict[float, list[int]] = {}
    for rank, number in numbers:
        if number:
            known = (one for one in ranks if abs(one - number) <= SAME_WEIGHT * abs(number))
            ranks.setdefault(next(known, number), []).append(rank)
    return ranks


def _not_these(rank: int | None) -> str:
    """What a line does with other gradients. ``rank``: on which it changes these as well."""
    these = "not these" if rank is None else f"these on rank {rank}"
    return f"changes other gradients, and {these}"


def _sums(call: Call) -> bool:
    return call.collective is not None and call.collective.reduce_op in ("SUM", "AVG")


def _first_other(path: Path, call: Call) -> bool:
    """True if the first state of a path that is no mixture was left by the same line."""
    for one in path.states:
        if one.mix is None:
            return one.call.kind is Kind.CHANGE and one.call.line == call.line
    return False


def _counts(weights: dict[int, float], least: float) -> bool:
    return any(abs(one) > least for one in weights.values())


def _counting(weights: Mapping[int, Mapping[int, float]]) -> str:
    """How much each backward pass counts, as a sentence."""
    by_rank = []
    for rank, passes in list(weights.items())[:MOST_SHOWN]:
        shown = [text_of(one, ".3g") for one in passes.values()]
        more = [*shown[:MOST_SHOWN], "..."] if len(shown) > MOST_SHOWN else shown
        by_rank.append(f"rank {rank} {', '.join(more)}")
    return f"The weights of the backward passes, in their order: {'; '.join(by_rank)}."


def _numbers(numbers: set[int]) -> str:
    return ", ".join(str(one + 1) for one in sorted(numbers))
