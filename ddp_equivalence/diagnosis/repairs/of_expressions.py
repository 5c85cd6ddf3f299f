"""Edits of expressions: operators, constants, indices, names, and what wraps a value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.over_ranks import Change, EditSite, reducers
from ddp_equivalence.diagnosis.repairs.source import arguments_of, closed, joined, likeness

# Edits that do something more with a value: divide it, detach it, or call a function with it.
#
# They are tried where a value goes: a right-hand side, an argument, a term of a sum, a result.

MOST_FUNCTIONS = 3
MOST_DIVISORS = 3

STARTS = {"start", "offset", "first", "begin", "base"}

# What these return is no tensor, and no number that is divided by the world size.
NO_TENSORS = {
    *("range", "enumerate", "zip", "list", "tuple", "dict", "set", "sorted", "reversed", "str"),
    *("parameters", "named_parameters", "items", "keys", "values", "isinstance", "getattr", "id"),
    *("chunk", "split", "state_dict", "append", "backward", "step", "zero_grad", "to_list", "len"),
    *(
        "get_rank",
        "get_world_size",
        "SGD",
        "Adam",
        "AdamW",
        "DistributedDataParallel",
        "all_reduce",
    ),
    *("arange", "randperm", "new_group", "broadcast", "device", "Generator", "manual_seed", "size"),
    *(
        "named_modules",
        "modules",
        "children",
        "get_group",
        "init_device_mesh",
        "dim",
        "filter",
        "map",
    ),
}


def computes_tensor(node: ast.expr, place: EditSite) -> bool:
    """False for what is known to be no tensor, and no number that could be divided."""
    if isinstance(node, ast.Call):
        called = place.called_name(node)
        return called not in NO_TENSORS and not called[:1].isupper()
    return place.may_be_tensor(node)


def goes_somewhere(node: ast.expr, place: EditSite) -> bool:
    """True for a value that may be a tensor and stands as a whole where it is used."""
    if not computes_tensor(node, place):
        return False
    match place.parent(node):
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Return():
            return True
        case ast.keyword() | ast.Lambda() | ast.IfExp():
            return True
        case ast.Call() as call:
            called = place.called_name(call)
            of_module = place.text(call.func).split(".")[0] in place.facts.modules
            return call.func is not node and called not in NO_TENSORS and not of_module
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return True
        case ast.Attribute(attr="backward"):
            return True
        case ast.Tuple() as values:
            return isinstance(place.parent(values), ast.Return)
        case _:
            return False


def divided_by_world_size(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """A sum over ranks was forgotten to be divided, or every rank adds the whole of something."""
    if goes_somewhere(node, place) and (world_size := place.world_size()):
        yield place.replaced(node, joined(place.text(node), "/", world_size))


def multiplied_by_world_size(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """Something else divides by the world size as well, as DDP does."""
    if goes_somewhere(node, place) and (world_size := place.world_size()):
        yield place.replaced(node, joined(place.text(node), "*", world_size))


def detached(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """A gradient flows back through something that should count as a constant."""
    if goes_somewhere(node, place) and not place.text(node).endswith(".detach()"):
        yield place.replaced(node, f"{place.closed(node)}.detach()")


def cloned(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """Two names stand for one tensor, and what changes one of them changes the other."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return
    match place.parent(node):
        case ast.Call(func=ast.Attribute(attr="append" | "setdefault" | "insert" | "apply")):
            is_kept = not place.is_called(node)
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Dict() | ast.keyword():
            is_kept = True
        case _:
            is_kept = False
    if is_kept and computes_tensor(node, place):
        yield place.replaced(node, f"{place.text(node)}.clone()")


def requires_grad(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A detached tensor is computed with anew, and gets no gradient of its own."""
    if place.called_name(node) == "detach" and not isinstance(place.parent(node), ast.Attribute):
        yield place.replaced(node, f"{place.text(node)}.requires_grad_()")


def function_applied(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """The file has a function for this, and its call was forgotten in one place."""
    is_number = isinstance(node, ast.Name) and place.scope.described_as_number(node.id)
    parent = place.parent(node)
    if not goes_somewhere(node, place) and not (is_number and isinstance(parent, ast.Assign)):
        return
    around = place.text(parent.func) if isinstance(parent, ast.Call) else ""
    own = place.called_name(node) if isinstance(node, ast.Call) else ""
    functions = [
        name
        for name, takes in place.facts.functions_at(node).items()
        if takes == 1 and name != around and name.rsplit(".", 1)[-1] != own
    ]
    for name in functions[:MOST_FUNCTIONS]:
        yield place.replaced(node, f"{name}({place.text(node)})")


def function_applied_to_all(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The file has a function for this, and its call was forgotten for all of some arguments."""
    called = place.text(node.func)
    is_of_torch = called.split(".")[0] in place.facts.modules
    tensors = [one for one in node.args if computes_tensor(one, place)]
    if is_of_torch or len(tensors) != len(node.args) or len(tensors) < 2 or node.keywords:
        return
    given = [place.text(one) for one in node.args]
    for name in reducers(place, node):
        if place.facts.functions_at(node)[name] == 1 and name != called:
            applied = ", ".join(f"{name}({one})" for one in given)
            yield place.replaced(node, f"{called}({applied})")


def times_an_argument(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """A backward pass forgets the gradient that it is given, as if that were always 1."""
    function = place.scope.function
    if getattr(function, "name", "") != "backward" or not isinstance(
        place.parent(node), ast.Return
    ):
        return
    for argument in arguments_of(function)[1:]:
        given = f"{argument.arg}[0]" if argument is function.args.vararg else argument.arg
        if isinstance(node, ast.Tuple):
            parts = [
                place.text(one)
                if isinstance(one, ast.Constant)
                else joined(given, "*", place.text(one))
                for one in node.elts
            ]
            yield place.replaced(node, ", ".join(parts))
        elif place.text(node).endswith(".saved_tensors"):
            yield place.replaced(node, f"tuple({given} * one for one in {place.text(node)})")
        elif place.may_be_tensor(node) and argument.arg not in place.text(node).split():
            yield place.replaced(node, joined(given, "*", place.text(node)))


def another_divisor(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """A sum is divided by the number of something else than of what was added up."""
    match place.parent(node):
        case ast.BinOp(op=ast.Div() | ast.FloorDiv(), right=right) if right is node:
            pass
        case ast.AugAssign(op=ast.Div(), value=value) if value is node:
            pass
        case ast.Call(func=ast.Attribute(attr="div_" | "div"), args=[first, *_]) if first is node:
            pass
        case _:
            return
    divisors = [place.world_size(), *place.scope.lengths()]
    text = place.text(node)
    if text.endswith(".local_world_size"):  # what is averaged over nodes afterwards
        rank = text.removesuffix(".local_world_size")
        divisors.insert(0, f"({rank}.world_size / {rank}.nodes)")
    for divisor in [one for one in divisors if one and one != place.text(node)][:MOST_DIVISORS]:
        yield place.replaced(node, divisor)


def rank_times_count(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """The place of this rank's rows is its number times how many rows each rank has."""
    text = place.text(node)
    is_number = text in ("rank", "get_rank()") or text.endswith((".rank", ".get_rank()"))
    if not is_number or not isinstance(place.parent(node), ast.Call | ast.keyword | ast.BinOp):
        return
    for count in place.scope.counts()[:MOST_DIVISORS]:
        yield place.replaced(node, joined(text, "*", count))


def diagonal_of_the_rank(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The rows of this rank are not the first among those of all ranks, nor is their diagonal."""
    match node:
        case ast.Call(func=ast.Attribute(value=square, attr="fill_diagonal_")):
            pass
        case ast.Call(func=ast.Attribute(attr="eye"), args=[square, _]):
            pass
        case _:
            return
    names = [one.id for one in ast.walk(square) if isinstance(one, ast.Name)]
    rows = [f"len({one})" for one in names if one in place.scope.names]
    if isinstance(node.func, ast.Attribute) and node.func.attr == "eye":
        rows = [place.text(square)]
    for count in rows[:1]:
        own = [
            f"{name}({count})"
            for name, takes in place.facts.functions_at(node).items()
            if takes == 1 and set(name.split("_")) & STARTS
        ]
        rank = _rank_or_none(place)
        for start in [*own, *([joined(rank, "*", count)] if rank else [])][:MOST_DIVISORS]:
            yield place.replaced(node, f"{place.text(node)}.roll({start}, 1)")


def _rank_or_none(place: EditSite) -> str | None:
    """The number of this rank, or 0 where one process computes the big batch."""
    rank, get_rank = place.rank(), place.facts.get_rank
    is_initialized = place.facts.imported_as("torch.distributed.is_initialized")
    if rank == get_rank and is_initialized:
        return f"{rank} if {is_initialized}() else 0"
    return rank


def counted_from_the_rank(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """Rows are numbered from 0 on every rank, but each rank has other rows of the whole."""
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[rows], keywords=[]):
            rank = _rank_or_none(place)
            if rank and isinstance(rows, ast.Name | ast.Attribute | ast.Subscript):
                start = joined(rank, "*", f"len({place.text(rows)})")
                yield place.replaced(node, f"enumerate({place.text(rows)}, {start})")
        case _:
            return


def offset_of_the_rank(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """Rows are counted from 0 on every rank, but each rank has other rows of the whole."""
    match node:
        case ast.Call(func=ast.Attribute(attr="arange"), args=[*_, count]):
            known = [*place.scope.names, *place.facts.own_attributes(node)]
            starts = [one for one in known if set(one.removeprefix("self.").split("_")) & STARTS]
            rank = place.rank()
            if rank and len(node.args) == 1:
                starts.append(joined(rank, "*", place.text(count)))
            for start in starts[:MOST_DIVISORS]:
                yield place.replaced(node, joined(place.text(node), "+", start))
        case _:
            return


# Edits of operators, comparisons and conditions.

OTHER_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("/",),
    ast.Div: ("*",),
    ast.FloorDiv: ("/", "%"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
}

ORDERED: dict[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.Div: "/",
    ast.Mod: "%",
    ast.FloorDiv: "//",
    ast.MatMult: "@",
}

OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=", ">", "<"),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}


def another_operator(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """Somebody divides instead of multiplying, or takes the row for the column (// for %)."""
    left, right = place.text(node.left), place.text(node.right)
    for sign in OTHER_OPERATORS.get(type(node.op), ()):
        yield place.replaced(node, joined(left, sign, right))


def operand_left_out(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """A factor or an offset was applied that another part of the code applies as well."""
    yield place.replaced(node, place.text(node.left))
    yield place.replaced(node, place.text(node.right))


def operands_swapped(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """A ratio or a difference was written the wrong way round."""
    if sign := ORDERED.get(type(node.op)):
        left, right = place.text(node.left), place.text(node.right)
        yield place.replaced(node, joined(right, sign, left))


def rounded_up(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """A size was rounded down, so that the last part of the data belongs to nobody."""
    if isinstance(node.op, ast.FloorDiv):
        left, right = place.text(node.left), place.text(node.right)
        yield place.replaced(node, f"-({joined(f'-{closed(left)}', '//', right)})")


def another_comparison(node: ast.Compare, place: EditSite) -> Iterator[Change]:
    """A limit was counted in or out by mistake, or a condition is the opposite of what is meant."""
    if len(node.ops) == 1:
        left, right = place.text(node.left), place.text(node.comparators[0])
        for sign in OTHER_COMPARISONS.get(type(node.ops[0]), ()):
            if (sign, right) != ("<", "0"):  # no rank and no count is negative
                yield place.replaced(node, joined(left, sign, right))


def condition_left_out(node: ast.BoolOp, place: EditSite) -> Iterator[Change]:
    """A condition holds on some ranks only, or was copied from another place."""
    sign = "and" if isinstance(node.op, ast.And) else "or"
    for value in node.values:
        rest = [place.text(other) for other in node.values if other is not value]
        yield place.replaced(node, _joined(rest, sign))


def and_or(node: ast.BoolOp, place: EditSite) -> Iterator[Change]:
    """Conditions were joined with "and" where one of them is enough, or the reverse."""
    sign = "or" if isinstance(node.op, ast.And) else "and"
    yield place.replaced(node, _joined([place.text(value) for value in node.values], sign))


def sign_left_out(node: ast.UnaryOp, place: EditSite) -> Iterator[Change]:
    """A sign or a "not" is one too many."""
    yield place.replaced(node, place.text(node.operand))


def parentheses_moved(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """A factor or a divisor reaches one term too many, or one too few."""
    if isinstance(node.op, ast.Mult | ast.Div):
        sign = "*" if isinstance(node.op, ast.Mult) else "/"
        left, right = place.text(node.left), place.text(node.right)
        match node.left, node.right:
            case ast.BinOp(left=first, op=ast.Add() | ast.Sub() as inner, right=second), _:
                last = joined(place.text(second), sign, right)
                yield place.replaced(node, joined(place.text(first), _weak(inner), last))
            case _, ast.BinOp(left=first, op=ast.Add() | ast.Sub() as inner, right=second):
                product = joined(left, sign, place.text(first))
                yield place.replaced(node, joined(product, _weak(inner), place.text(second)))
    if isinstance(node.op, ast.Add | ast.Sub):
        left, right, sign = place.text(node.left), place.text(node.right), _weak(node.op)
        match node.left, node.right:
            case _, ast.BinOp(left=first, op=ast.Mult() | ast.Div() as strong, right=second):
                both = joined(left, sign, place.text(first))
                by = "*" if isinstance(strong, ast.Mult) else "/"
                yield place.replaced(node, joined(both, by, place.text(second)))
            case ast.BinOp(left=first, op=ast.Mult(), right=second), _:
                both = joined(place.text(second), sign, right)
                yield place.replaced(node, joined(place.text(first), "*", both))


def _weak(operator: ast.operator) -> str:
    return "+" if isinstance(operator, ast.Add) else "-"


def _joined(texts: list[str], sign: str) -> str:
    whole = texts[0]
    for text in texts[1:]:
        whole = joined(whole, sign, text)
    return whole


# Edits of numbers, truth values and strings.

MOST_STRINGS = 4

# A smaller number only keeps a division from failing.
MARGIN = 1e-4

# Variables of the environment that are mixed up, and axes of a mesh.
MIXED_UP = (
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("sum", "mean", "none"),
)


def another_number(node: ast.Constant, place: EditSite) -> Iterator[Change]:
    """A number is one too large or too small, has the wrong sign, or names another dimension."""
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool):
        negative = isinstance(place.parent(node), ast.UnaryOp)
        others = (1, 0, value + 1, value - 1) if negative else (value + 1, value - 1, -value, 0, 1)
        for other in dict.fromkeys(others):
            if other != value:
                yield place.replaced(node, str(other))
    elif isinstance(value, float):
        rest = (round(1 - value, 12),) if MARGIN < value < 1 - MARGIN else ()
        for fraction in dict.fromkeys((1.0, 0.0, *rest)):
            if fraction != value and abs(value) > MARGIN:
                yield place.replaced(node, repr(fraction))


def the_other_truth_value(node: ast.Constant, place: EditSite) -> Iterator[Change]:
    """An option is on where it should be off."""
    if isinstance(node.value, bool):
        yield place.replaced(node, str(not node.value))


def another_string(node: ast.Constant, place: EditSite) -> Iterator[Change]:
    """Another key, name of a dimension or option was meant, which the file uses elsewhere."""
    if not isinstance(node.value, str):
        return
    known = [other for group in MIXED_UP if node.value in group for other in group]
    others = dict.fromkeys([*known, *place.facts.strings.exchangeable(node)])
    for other in [one for one in others if one != node.value][:MOST_STRINGS]:
        yield place.replaced(node, _quoted(other, place.text(node)))


def _quoted(value: str, like: str) -> str:
    quoted = repr(value)
    plain = quoted[1:-1]
    return f'"{plain}"' if like.startswith('"') and '"' not in plain else quoted


# Edits of slices and indices.


def another_slice(node: ast.Slice, place: EditSite) -> Iterator[Change]:
    """A part of the rows begins or ends one too early or too late, or should be all rows."""
    lower = place.text(node.lower) if node.lower else ""
    upper = place.text(node.upper) if node.upper else ""
    step = f":{place.text(node.step)}" if node.step else ""
    start, end = place.source.span(node)
    others = []
    if lower:
        others += [f":{upper}", *(f"{one}:{upper}" for one in _moved(lower))]
    if upper:
        others += [f"{lower}:", *(f"{lower}:{one}" for one in _moved(upper))]
    if not lower:
        others.append(f"1:{upper}")
    if not upper:
        others.append(f"{lower}:-1")
    if step:
        yield Change(start, end, f"{lower}:{upper}")
    for other in others:
        yield Change(start, end, other + step)


def _moved(bound: str) -> Iterator[str]:
    for sign in "+-":
        yield joined(bound, sign, "1")


def subscript_left_out(node: ast.Subscript, place: EditSite) -> Iterator[Change]:
    """A part was taken of something that is a part already, or the order was applied twice."""
    if not isinstance(node.ctx, ast.Load):
        return
    yield place.replaced(node, place.text(node.value))


def permutation_inverted(node: ast.Subscript, place: EditSite) -> Iterator[Change]:
    """Rows are put into an order again where they should be put back."""
    if isinstance(node.slice, ast.Name) and place.scope.may_be_tensor(node.slice.id):
        yield place.replaced(node.slice, f"{node.slice.id}.argsort()")


def index_off_by_one(node: ast.Subscript, place: EditSite) -> Iterator[Change]:
    """The counting begins at another number than that of what is read."""
    if isinstance(node.slice, ast.Name | ast.BinOp):
        text = place.text(node.slice)
        if isinstance(node.slice, ast.BinOp) or place.scope.may_be_number(text):
            for moved in _moved(text):
                yield place.replaced(node.slice, moved)


def shifted_too(node: ast.Compare, place: EditSite) -> Iterator[Change]:
    """A causal model predicts from the second position on, and only those are to be counted."""
    match node:
        case ast.Compare(left=ast.Subscript() | ast.Name() as left, ops=[ast.NotEq() | ast.Eq()]):
            if place.may_be_tensor(left):
                yield place.replaced(left, f"{place.text(left)}[:, 1:]")


def shifted_call(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A causal model predicts from the second position on, and only those are to be counted."""
    match node.func:
        case ast.Attribute(value=ast.Subscript() | ast.Name() as value, attr="ne" | "eq"):
            yield place.replaced(value, f"{place.text(value)}[:, 1:]")


def range_off_by_one(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A loop makes one turn too many or too few."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=[*_, _]):
            last = node.args[min(1, len(node.args) - 1)]
            for moved in _moved(place.text(last)):
                yield place.replaced(last, moved)
            if len(node.args) == 1:
                yield place.replaced(last, f"1, {place.text(last)}")


# Edits of the order of axes, and of the end at which a slice lies.

MOST_AXES = 3


def sizes_swapped(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """Rows are laid out by one thing and then by another, and are read the other way round."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=value, attr="view" | "reshape" as method),
            args=[_, _, *_] as sizes,
            keywords=[],
        ) if not any(isinstance(one, ast.Starred) for one in sizes):
            texts = [place.text(one) for one in sizes]
            for axis in range(min(len(texts), MOST_AXES) - 1):
                other = [*texts]
                other[axis : axis + 2] = texts[axis + 1], texts[axis]
                if texts[axis] != texts[axis + 1]:
                    viewed = f"{place.text(value)}.{method}({', '.join(other)})"
                    yield place.replaced(node, f"{viewed}.transpose({axis}, {axis + 1})")
        case _:
            return


def mirrored(node: ast.Slice, place: EditSite) -> Iterator[Change]:
    """What belongs to the end of a stretch is put at its beginning, or the reverse."""
    if node.step is not None:
        return
    start, end = place.source.span(node)
    match node.lower, node.upper:
        case None, ast.UnaryOp(op=ast.USub(), operand=n):
            yield Change(start, end, f"{place.text(n)}:")
        case None, ast.expr() as n:
            yield Change(start, end, f"{_negative(n, place)}:")
        case ast.UnaryOp(op=ast.USub(), operand=n), None:
            yield Change(start, end, f":{place.text(n)}")
        case ast.expr() as n, None:
            yield Change(start, end, f":{_negative(n, place)}")
        case _:
            return


def _negative(node: ast.expr, place: EditSite) -> str:
    text = place.text(node)
    return f"-{text if text.isdigit() else closed(text)}"


def both_bounds(node: ast.Compare, place: EditSite) -> Iterator[Change]:
    """What belongs to this rank lies between two bounds, and only one of them is asked for."""
    match node:
        case ast.Compare(left=left, ops=[ast.Lt()], comparators=[ast.Name(id=stop)]):
            for start in [one for one, other in _bounds(place) if other == stop]:
                text = place.text(left)
                yield place.replaced(node, f"({start} <= {text}) & ({place.text(node)})")
        case ast.Compare(left=left, ops=[ast.GtE()], comparators=[ast.Name(id=start)]):
            for stop in [other for one, other in _bounds(place) if one == start]:
                text = place.text(left)
                yield place.replaced(node, f"({place.text(node)}) & ({text} < {stop})")
        case _:
            return


def _bounds(place: EditSite) -> list[tuple[str, str]]:
    """The names that stand on both sides of the colon of a slice."""
    found = []
    for node in ast.walk(place.scope.function):
        match node:
            case ast.Slice(lower=ast.Name(id=start), upper=ast.Name(id=stop)):
                found.append((start, stop))
            case _:
                pass
    return list(dict.fromkeys(found))


# Edits that exchange names and attributes for others of the same function, class or file.

# As many others are tried for one name: with and without descriptions of the values of a run.
MOST_MEASURED = 8
MOST_GUESSED = 3
MOST_ATTRIBUTES = 4

NUMBERS_OF_A_RANK = ("rank", "local_rank", "node", "world_size", "local_world_size", "nodes")

# Calls with one of these words in their name compute what a name often holds already.
STATISTICS = {
    *("mean", "sum", "max", "min", "amax", "amin", "var", "variance", "std", "norm", "average"),
    *("count", "numel", "len", "size", "number", "total", "moments", "detach"),
}


def another_name(node: ast.Name, place: EditSite) -> Iterator[Change]:
    """A name of the same function was meant, such as the part of a batch and not the whole."""
    scope = place.scope
    if node.id not in scope.names or node.id in ("self", "cls", "ctx"):
        return
    if place.is_called(node) and scope.description(node.id) != "function":
        return
    most = MOST_MEASURED if scope.measured else MOST_GUESSED
    for other in scope.names_like(node.id, place.first_line(node))[:most]:
        yield place.replaced(node, other)


def another_attribute(node: ast.Attribute, place: EditSite) -> Iterator[Change]:
    """Another attribute of the same object was meant, such as another process group."""
    if place.is_called(node) or _is_number_of_a_rank(node, place):
        return
    before = place.text(node.value)
    for other in _most_like(node.attr, place.facts.attributes_beside(node))[:MOST_ATTRIBUTES]:
        own, described = (place.scope.description(f"{before}.{one}") for one in (node.attr, other))
        if own == described or not (own and described):
            yield place.renamed(node, other)


def _is_number_of_a_rank(node: ast.Attribute, place: EditSite) -> bool:
    of_rank = place.text(node.value).rsplit(".", 1)[-1].strip("_") == "rank"
    return of_rank and node.attr in NUMBERS_OF_A_RANK


def attribute_left_out(node: ast.Attribute, place: EditSite) -> Iterator[Change]:
    """A part of an object was taken where the object itself was meant."""
    text = place.text(node.value)
    is_module = text.split(".")[0] in place.facts.modules
    if not (place.is_called(node) or is_module or text in ("self", "ctx", "cls", "super()")):
        yield place.replaced(node, text)


def name_for_call(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A statistic of this rank's part is computed anew, although that of all ranks is at hand."""
    called = place.called_name(node)
    words = set(called.strip("_").split("_"))
    if not words & STATISTICS:
        return
    names = [
        name
        for name in place.scope.names_before(place.first_line(node), called)
        if (place.scope.may_be_tensor(name) or place.scope.may_be_number(name))
        and name not in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        and place.scope.description(name) != "function"
    ]
    for name in names[:MOST_GUESSED]:
        yield place.replaced(node, name)


def _most_like(name: str, others: list[str]) -> list[str]:
    return sorted((one for one in others if one != name), key=lambda one: -likeness(name, one))
