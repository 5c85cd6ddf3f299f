"""The table of small edits that may repair a step: mistakes, each with patterns of code.

The mistakes whose edits repair most steps for each edit that is tried come first. The order was
found on 200 faulty steps whose faulty line is known (``benchmarks/steps/known``): the number of
steps that a mistake's edits repair at this line, divided by the number of edits that they have on
all lines of a step. ``patterns.py`` says how patterns are written, and ``holes.py`` what their
holes take.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from ddp_equivalence.diagnosis.repairs import holes
from ddp_equivalence.diagnosis.repairs.patterns import Pattern


@dataclass(frozen=True)
class Mistake:
    """``why``: why people make it. ``patterns``: the code, and what may stand in its place.

    ``said``: what an edit does, where that is easier said than shown.
    ``is_broad``: True if its edits often repair a step at another line than the faulty one: what
    leaves out the part that has the fault, or scales it away, is right as well. Of the steps s161
    to s200 in benchmarks/steps/known, such edits repaired 8 at the faulty line and 22 elsewhere,
    all others 30 and 12 (each mistake counted once a step; a record of 2026-11-23).
    """

    why: str
    patterns: tuple[Pattern, ...]
    said: str = ""
    is_broad: bool = False


def _mistake(why: str, *rows: tuple[str, ...], said: str = "", is_broad: bool = False) -> Mistake:
    return Mistake(why, tuple(Pattern(*row) for row in rows), said, is_broad)


def _with(signs: str, *rows: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The rows with each of these signs in place of "OP"."""
    return [
        tuple(text.replace("OP", sign) for text in row) for sign in signs.split() for row in rows
    ]


def _pairs(listed: str) -> list[tuple[str, str]]:
    """Each name with each other one that stands with it between two commas."""
    return [pair for names in listed.split(",") for pair in permutations(names.split(), 2)]


# Functions, methods and members of torch that are mixed up: each may be meant for another.
MIXED_UP = """
SUM AVG MAX MIN, sum mean, max min, amax amin, argmax argmin, union intersection, std var,
repeat repeat_interleave, chunk tensor_split, square abs, softmax log_softmax, log log1p,
exp expm1, floor ceil round, any all, train eval, detach clone, contiguous clone, zeros ones,
zeros_like ones_like, zeros_like clone, long double, int float, half float, bfloat16 float,
div_ mul_, div mul, add_ copy_, scatter_ scatter_add_, index_copy_ index_add_, append extend,
keys values, get_rank get_world_size, get_rank get_local_rank, no_grad enable_grad,
l1_loss mse_loss
"""
MIXED_UP_BUILTINS = "list sorted, max min, any all, int float"

MIXED_UP_STRINGS = "RANK LOCAL_RANK NODE_RANK, WORLD_SIZE LOCAL_WORLD_SIZE, sum mean none"

ALL_ARGUMENTS = "*$args, **$options"

OTHER_COMPARISONS = "< <=, < >, <= >, > >=, <= <, >= <, == !=, == >, == <"

MISTAKES = (
    _mistake(
        "A size was rounded down, so that the last part of the data belongs to nobody.",
        ("$x // $y", "-(-$x // $y)"),
    ),
    _mistake(
        "The prefix `layers.1` is also the beginning of `layers.10`, and `item` of `item_text`.",
        ("$x.startswith($prefix)", "$x.startswith($prefix + '.')"),
    ),
    _mistake(
        "A backward pass forgets the gradient that it is given, as if that were always 1.",
        ("return $result", "return $times_gradient"),
    ),
    _mistake(
        "A function ends where only one turn of a loop should, or a loop where one turn should.",
        ("return $x", "continue"),
        ("return", "continue", "pass"),
        ("continue", "pass", "break"),
        ("break", "continue", "pass"),
    ),
    _mistake(
        "A context such as `no_sync()` or `no_grad()` holds for more than it should.",
        ("with $context:\n    *$body", "if True:\n    *$body"),
        said="without this `with`",
        is_broad=True,
    ),
    _mistake(
        "A condition is joined wrongly, holds on some ranks only, or is the opposite of what is "
        "meant.",
        ("$x and $y", "$x or $y"),
        ("$x or $y", "$x and $y"),
        *_with(
            "if while",
            (
                "OP $test:\n    *$body\nelse:\n    *$other",
                "OP True:\n    *$body\nelse:\n    *$other",
                "OP not $test:\n    *$body\nelse:\n    *$other",
            ),
        ),
        is_broad=True,
    ),
    _mistake(
        "A condition holds on some ranks only, or was copied from another place.",
        *_with("and or", ("$x OP $y", "$x", "$y")),
        *_with("and or", ("$x OP $y OP $z", "$x OP $y", "$x OP $z", "$y OP $z")),
        is_broad=True,  # it may only lead round what is wrong
    ),
    _mistake(
        "The counting begins at another number than that of what is read.",
        ("$x[$index]", "$x[$index + 1]", "$x[$index - 1]"),
    ),
    _mistake(
        "A limit was counted in or out by mistake, or a condition is the opposite of what is "
        "meant.",
        *((f"$x {sign} $y", f"$x {other} $y") for sign, other in _pairs(OTHER_COMPARISONS)),
        *((f"$x {one} $y", f"$x {other} $y") for one, other in permutations(("in", "not in"))),
        *((f"$x {one} $y", f"$x {other} $y") for one, other in permutations(("is", "is not"))),
        is_broad=True,  # it may only lead round what is wrong, too
    ),
    _mistake(
        "Rows are put into an order again where they should be put back.",
        ("$x[$order]", "$x[$order.argsort()]"),
    ),
    _mistake(
        "What belongs to the end of a stretch is put at its beginning, or the reverse.",
        ("_[:$unsigned]", "_[-$unsigned:]"),
        ("_[$unsigned:]", "_[:-$unsigned]"),
        ("_[:-$n]", "_[$n:]"),
        ("_[-$n:]", "_[:$n]"),
    ),
    _mistake(
        "Two functions have names or purposes that are easily mixed up.",
        *((f"$x.{one}", f"$x.{other}") for one, other in _pairs(MIXED_UP)),
        *((f"{one}($x)", f"{other}($x)") for one, other in _pairs(MIXED_UP_BUILTINS)),
    ),
    _mistake(
        "The list of tensors lacks the buffers, or has a shared tensor twice.",
        ("$x.parameters()", "$x.state_dict().values()"),
        ("$x.state_dict(**$options).values()", "$x.parameters()"),
        is_broad=True,
    ),
    _mistake(
        "A part replaces the parts before it instead of being added to them, or the reverse.",
        ("$target = $x", "$target += $x"),
        *_with("+= -= *= /=", ("$x OP $y", "$x = $y")),
        *((f"$x {sign}= $y", f"$x {other}= $y") for sign, other in _pairs("+ -, * /")),
        ("$x[$order] += $y", "$x.index_add_(0, $order, $y)"),
    ),
    _mistake(
        "A sum is divided by the number of something else than of what was added up.",
        *_with("/ // /=", ("$x OP $y", "$x OP $other_divisor")),
        *_with("div div_", ("$x.OP($y)", "$x.OP($other_divisor)")),
    ),
    _mistake(
        "A factor or a divisor reaches one term too many, or one too few.",
        *_with("+ -", ("$x * $y OP $z", "$x * ($y OP $z)")),
        *_with(
            "* /",
            ("($x + $y) OP $z", "$x + $y OP $z"),
            ("($x - $y) OP $z", "$x - $y OP $z"),
            ("$z OP ($x + $y)", "$z OP $x + $y"),
            ("$z OP ($x - $y)", "$z OP $x - $y"),
            ("$x + $y OP $z", "($x + $y) OP $z"),
            ("$x - $y OP $z", "($x - $y) OP $z"),
        ),
    ),
    _mistake(
        "An option is on where it should be off, or the reverse.",
        ("True", "False"),
        ("False", "True"),
    ),
    _mistake(
        "Somebody divides instead of multiplying, or takes the row for the column (// for %).",
        *((f"$x {sign} $y", f"$x {other} $y") for sign, other in _pairs("+ -, * /, // %")),
        ("$x // $y", "$x / $y"),
        ("$x ** $y", "$x * $y"),
    ),
    _mistake(
        "A statistic of this rank's part is computed anew, although that of all ranks is at hand.",
        ("$statistic", "$name_at_hand"),
    ),
    _mistake(
        "A loop makes one turn too many or too few.",
        ("range($n)", "range($n + 1)", "range($n - 1)", "range(1, $n)"),
        ("range($x, $n)", "range($x, $n + 1)", "range($x, $n - 1)"),
    ),
    _mistake(
        "Another attribute of the same object was meant, such as another process group.",
        ("$attribute", "$attribute_beside"),
    ),
    _mistake(
        "A part of the rows begins or ends one too early or too late, or should be all rows.",
        (
            "_[$x:$maybe_y:$maybe_z]",
            "_[:$maybe_y:$maybe_z]",
            "_[$x + 1:$maybe_y:$maybe_z]",
            "_[$x - 1:$maybe_y:$maybe_z]",
        ),
        (
            "_[$maybe_x:$y:$maybe_z]",
            "_[$maybe_x::$maybe_z]",
            "_[$maybe_x:$y + 1:$maybe_z]",
            "_[$maybe_x:$y - 1:$maybe_z]",
        ),
        ("_[:$maybe_y:$maybe_z]", "_[1:$maybe_y:$maybe_z]"),
        ("_[$maybe_x::$maybe_z]", "_[$maybe_x:-1:$maybe_z]"),
        ("_[$maybe_x:$maybe_y:$z]", "_[$maybe_x:$maybe_y]"),
        *_with("== !=", ("$tensor OP $x", "$tensor[:, 1:] OP $x")),
        *_with("eq ne", ("$tensor.OP($x)", "$tensor[:, 1:].OP($x)")),
    ),
    _mistake(
        "Something is done that another part of the code does already, or that is not wanted here.",
        ("$statement", "pass"),
        said="without this statement",
        is_broad=True,
    ),
    _mistake(
        "A part of an object was taken where the object itself was meant.",
        ("$whole.$name_of_part", "$whole"),
    ),
    _mistake(
        "An option was copied from another place, or means something else than was thought.",
        (
            "$called(*$args, **$before, $option=$x, **$after)",
            "$called(*$args, **$before, **$after)",
        ),
    ),
    _mistake(
        "Two steps were done in the wrong order, such as clipping before averaging.",
        ("$preceding\n$following", "$following\n$preceding"),
        said="with this statement behind the next one",
        is_broad=True,
    ),
    _mistake(
        "A value was detached, cast, limited or reduced where it should be used as it is.",
        (f"$receiver.$needless({ALL_ARGUMENTS})", "$receiver"),
        ("$needless($argument)", "$argument"),
        (f"$shaping($argument, {ALL_ARGUMENTS})", "$argument"),
    ),
    _mistake(
        "A factor or an offset was applied that another part of the code applies as well.",
        *_with("+ - * / // % ** @ &", ("$x OP $y", "$x", "$y")),
    ),
    _mistake(
        "A part was taken of something that is a part already, or the order was applied twice.",
        ("$x[$y]", "$x"),
    ),
    _mistake(
        "Another variable of the environment, or another option, was meant.",
        *((repr(one), repr(other)) for one, other in _pairs(MIXED_UP_STRINGS)),
    ),
    _mistake(
        "A number of this rank is used as if it were that of all ranks.",
        *_with(
            "= += -= *= /=",
            (
                "$reducible OP $x",
                "$reducible OP $x\n$all_reduce($reducible)",
                "$reducible OP $x\n$all_reduce($reducible)\n$reducible /= $world_size",
            ),
        ),
        is_broad=True,
    ),
    _mistake(
        "Another name of the same function was meant, such as a part of the batch.",
        ("$name", "$other_name"),
    ),
    _mistake(
        "A function returns what it has computed, and changes nothing of what it is given.",
        (
            "$called($assignable, *$args, **$options)",
            "$assignable = $called($assignable, *$args, **$options)",
        ),
        (
            f"$assignable.$method({ALL_ARGUMENTS})",
            f"$assignable = $assignable.$method({ALL_ARGUMENTS})",
        ),
    ),
    _mistake("A sign or a `not` is one too many.", ("-$x", "$x"), ("not $x", "$x")),
    _mistake(
        "A sum over ranks was forgotten to be divided, or something else divides it as well.",
        ("$value", "$value / $world_size", "$value * $world_size"),
        is_broad=True,
    ),
    _mistake(
        "A number is one too large or too small, has the wrong sign, or names another dimension.",
        ("$number", "$other_number"),
        is_broad=True,
    ),
    _mistake(
        "A gradient flows back through something that should count as a constant.",
        ("$value", "$value.detach()"),
    ),
)

assert holes  # its functions are found by the names of holes
