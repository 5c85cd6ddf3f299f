"""Edits of statements and blocks: their order, their jumps, and backward passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_equivalence.diagnosis.repairs.of_expressions import computes_tensor
from ddp_equivalence.diagnosis.repairs.over_ranks import Change, EditSite, is_reducer, reduces
from ddp_equivalence.diagnosis.repairs.source import joined, own_nodes

# Edits of simple statements: other assignments, results that are used, jumps, reductions.

OTHER_ASSIGNMENTS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("=", "-="),
    ast.Sub: ("=", "+="),
    ast.Mult: ("=", "/="),
    ast.Div: ("=", "*="),
}


def added_up(node: ast.Assign, place: EditSite) -> Iterator[Change]:
    """A part replaces the parts before it, instead of being added to them."""
    if len(node.targets) == 1 and not isinstance(node.targets[0], ast.Tuple):
        target = place.text(node.targets[0])
        in_init = getattr(place.scope.function, "name", "") == "__init__"
        if in_init or target in place.text(node.value):
            return
        if not isinstance(node.targets[0], ast.Name) or place.is_bound_elsewhere(target, node):
            yield place.rewritten(node, f"{target} += {place.text(node.value)}")


def equal_indices_added(node: ast.AugAssign, place: EditSite) -> Iterator[Change]:
    """An index that occurs twice is added only once by ``+=``."""
    match node:
        case ast.AugAssign(
            target=ast.Subscript(value=table, slice=ast.Name(id=index)), op=ast.Add(), value=value
        ) if place.scope.may_be_tensor(index):
            added = f"{place.text(table)}.index_add_(0, {index}, {place.text(value)})"
            yield place.rewritten(node, added)


def returned(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """A function computes something as its last step and forgets to return it."""
    function = place.scope.function
    if isinstance(function, ast.Lambda) or function.body[-1] is not node:
        return
    match node:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Expr(value=ast.Call() as value):
            yield place.rewritten(node, f"return {place.text(value)}")
        case _:
            return


def jump(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """A function ends where only one turn of a loop should, or a loop where one turn should."""
    around = place.source.nearest(node, ast.For, ast.While, ast.FunctionDef)
    in_loop = isinstance(around, ast.For | ast.While)
    match node:
        case ast.Return() if in_loop:
            yield place.rewritten(node, "continue")
        case ast.Return(value=None):
            yield place.rewritten(node, "pass")
        case ast.Continue():
            yield place.rewritten(node, "pass")
            yield place.rewritten(node, "break")
        case ast.Break():
            yield place.rewritten(node, "continue")
            yield place.rewritten(node, "pass")
        case _:
            return


def reduced(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """A number of this rank is used as if it were that of all ranks."""
    target = _assigned_tensor(node, place)
    all_reduce, world_size = place.facts.all_reduce, place.world_size()
    if target and all_reduce:
        yield place.followed_by(node, f"{all_reduce}({target})")
        for group in _groups(place):
            yield place.followed_by(node, f"{all_reduce}({target}, group={group})")
        if world_size:
            yield place.followed_by(node, f"{all_reduce}({target}); {target} /= {world_size}")


def _groups(place: EditSite) -> list[str]:
    """How the function writes the process group, if it has one."""
    found = [
        place.text(one)
        for one in own_nodes(place.scope.function)
        if isinstance(one, ast.Attribute | ast.Name)
        and getattr(one, "attr", getattr(one, "id", "")) in ("group", "process_group")
        and isinstance(one.ctx, ast.Load)
    ]
    return list(dict.fromkeys(found))[:1]


def _assigned_tensor(node: ast.stmt, place: EditSite) -> str | None:
    match node:
        case ast.Assign(targets=[target], value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pass
        case ast.AugAssign(target=target, value=value):
            pass
        case _:
            return None
    text = place.text(target)
    may_be = isinstance(target, ast.Name | ast.Attribute) and place.scope.may_be_tensor(text)
    return text if may_be and computes_tensor(value, place) else None


def reduced_with_gradient(node: ast.Expr, place: EditSite) -> Iterator[Change]:
    """A collective of torch.distributed passes no gradient on to what the other ranks gave."""
    match node.value:
        case ast.Call(args=[ast.Name(id=name), *_] as arguments, keywords=keywords):
            called = place.called_name(node.value)
            options = [place.text(one) for one in keywords]
            module = "torch.distributed.nn.functional"
            given = f"import {module} as differentiable; {name} = differentiable.{called}"
            if any(one.arg == "async_op" for one in keywords):
                return
            if called == "all_reduce" and len(arguments) == 1:
                yield place.rewritten(node, f"{given}({', '.join([name, *options])})")
            if called == "all_gather" and len(arguments) == 2:
                given_to = [place.text(arguments[1]), *options]
                yield place.rewritten(node, f"{given}({', '.join(given_to)})")
        case _:
            return


def left_out(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """Something is done that another part of the code does already, or that is not wanted here."""
    if isinstance(node, ast.Pass | ast.Return | ast.Continue | ast.Break | ast.FunctionDef):
        return
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            if not place.is_bound_elsewhere(name, node):
                return  # what reads it could not run
        case ast.Assign(targets=[ast.Tuple()]):
            return
    yield place.rewritten(node, "pass")


def assigned(node: ast.AugAssign, place: EditSite) -> Iterator[Change]:
    """What was there before should be replaced, or the opposite is done of what is meant."""
    for sign in OTHER_ASSIGNMENTS.get(type(node.op), ()):
        target, value = place.text(node.target), place.text(node.value)
        yield place.rewritten(node, f"{target} {sign} {value}")


def result_used(node: ast.Expr, place: EditSite) -> Iterator[Change]:
    """A function returns what it has computed, and changes nothing of what it is given."""
    if not isinstance(node.value, ast.Call):
        return
    call = place.text(node.value)
    for argument in node.value.args[:1]:
        if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript):
            yield place.rewritten(node, f"{place.text(argument)} = {call}")
    match node.value.func:
        case ast.Attribute(value=ast.Name(id=name)) if name in place.scope.names:
            if name not in ("self", "ctx"):
                yield place.rewritten(node, f"{name} = {call}")
        case ast.Attribute(value=ast.Attribute() as owner):
            if place.text(owner).split(".")[0] not in place.facts.modules:
                yield place.rewritten(node, f"{place.text(owner)} = {call}")


# Edits of blocks: statements that change places, and the headers of blocks.

_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try)
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

MOST_MOVED = 3


def swapped(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """Two steps were done in the wrong order, such as clipping before averaging."""
    block, index = place.source.block_of(node), place.source.index_in_block(node)
    if index + 1 < len(block):
        yield from _swap(node, block[index + 1], place)


def _swap(one: ast.stmt, other: ast.stmt, place: EditSite) -> Iterator[Change]:
    if _can_be_swapped(one, other):
        start, first_end = place.source.span(one)
        second_start, end = place.source.span(other)
        middle = place.source.between(first_end, second_start)
        yield Change(start, end, place.text(other) + middle + place.text(one))


def _can_be_swapped(one: ast.stmt, other: ast.stmt) -> bool:
    if isinstance(one, _JUMPS + _DEFINITIONS) or isinstance(other, _JUMPS + _DEFINITIONS):
        return False
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return False
    only_names = all(
        isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        for each in (one, other)
    )
    new = _names(one, ast.Store) & _names(other, ast.Load)
    return not only_names and not (new and isinstance(one, ast.Assign | ast.AnnAssign | ast.With))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, context)
    }


def moved_out(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """Something is done in every turn of a loop, or only under a condition, and should be after."""
    around = place.parent(node)
    block = place.source.block_of(node)
    if not isinstance(around, _COMPOUND):
        return
    index = place.source.index_in_block(node)
    tail = block[index:]
    no_more_than_header = index == 0 and isinstance(around, ast.If | ast.With)
    if len(tail) <= MOST_MOVED and not (isinstance(tail[-1], _JUMPS) or no_more_than_header):
        yield from _behind(tail, around, place)


def _behind(tail: Sequence[ast.stmt], around: ast.stmt, place: EditSite) -> Iterator[Change]:
    start, tail_end = place.source.span(tail[0])[0], place.source.span(tail[-1])[1]
    end = place.source.span(around)[1]
    text = _at_indentation(tail, around, place)
    if text is not None:
        rest = place.source.between(tail_end, end)
        yield Change(start, end, f"pass{rest}{place.new_line(around)}{text}")


def _at_indentation(statements: Sequence[ast.stmt], like: ast.stmt, place: EditSite) -> str | None:
    """The text of statements with the indentation of another one; None where it would change."""
    old, new = place.source.indentation(statements[0]), place.source.indentation(like)
    if old is None or new is None or isinstance(statements[0], _DEFINITIONS):
        return None
    start, end = place.source.span(statements[0])[0], place.source.span(statements[-1])[1]
    first, *lines = place.source.between(start, end).split("\n")
    for one in statements:
        for part in ast.walk(one):
            if isinstance(part, ast.Constant | ast.JoinedStr) and part.lineno != part.end_lineno:
                return None  # the lines of a string would move with it
    return "\n".join([first, *(new + line.removeprefix(old) for line in lines)])


def condition_of_block(node: ast.stmt, place: EditSite) -> Iterator[Change]:
    """A condition holds on some ranks only, or is the opposite of what is meant."""
    if not isinstance(node, ast.If | ast.While):
        return
    text = place.text(node.test)
    yield place.replaced(node.test, "True")
    yield place.replaced(node.test, f"not {text}" if _is_closed(node.test) else f"not ({text})")
    if node.orelse:
        yield place.replaced(node.test, "False")


def _is_closed(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def context_left_out(node: ast.With, place: EditSite) -> Iterator[Change]:
    """A context such as ``no_sync()`` or ``no_grad()`` holds for more than it should."""
    start = place.source.span(node)[0]
    end = place.source.span(node.body[0])[0]
    header = place.source.between(start, end)
    after_colon = header[header.rindex(":") :]
    yield Change(start, end, f"if True{after_colon}")


def other_list_too(node: ast.For, place: EditSite) -> Iterator[Change]:
    """A loop goes over one of several lists, and another one was forgotten."""
    match node.iter:
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            others = [f"self.{one}" for one in place.facts.attributes_beside(node.iter)]
            own = place.scope.description(f"self.{attribute}")
            for other in [one for one in others if place.scope.description(one) == own][:2]:
                yield place.replaced(node.iter, joined(f"self.{attribute}", "+", other))
        case _:
            return


# Edits of backward passes: how many there are, into what they lead, and what was there before.

MOST_OWNERS = 2


def _goes_backward(statement: ast.stmt) -> ast.expr | None:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr="backward"), args=[])):
            return value
        case _:
            return None


def only_these_parameters(node: ast.Expr, place: EditSite) -> Iterator[Change]:
    """A loss leads back through another network too, which it is not meant to train."""
    value = _goes_backward(node)
    if value is None or not isinstance(node.value, ast.Call) or node.value.keywords:
        return
    for owner in _networks(place)[:MOST_OWNERS]:
        inputs = f"inputs=list({owner}.parameters())"
        yield place.rewritten(node, f"{place.closed(value)}.backward({inputs})")


def _networks(place: EditSite) -> list[str]:
    """What the function calls, and what the file asks for its parameters in other places."""
    listed, called = set(), []
    for one in ast.walk(place.source.tree):
        match one:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr="parameters")):
                listed.add(name)
            case _:
                pass
    for one in ast.walk(place.scope.function):
        match one:
            case ast.Call(func=ast.Attribute(attr=name) as function) if name in listed:
                called.append(place.text(function))
            case _:
                pass
    return list(dict.fromkeys(called))


def hooks_replaced(node: ast.Expr, place: EditSite) -> Iterator[Change]:
    """Hooks are registered in every step, and those of the steps before still act."""
    match node.value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="register_hook")):
            yield place.rewritten(node, f"{name}._backward_hooks = None; {place.text(node)}")
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="register_post_accumulate_grad_hook")
        ):
            before = f"{name}._post_accumulate_grad_hooks = None"
            yield place.rewritten(node, f"{before}; {place.text(node)}")
        case _:
            return


def before_skipped(node: ast.Continue, place: EditSite) -> Iterator[Change]:
    """What is skipped needs its place all the same: an offset must go on behind it."""
    loop = place.source.nearest(node, ast.For)
    if loop is None:
        return
    last = loop.body[-1]
    if not isinstance(last, ast.AugAssign):
        return
    names = {one.id for one in ast.walk(last.value) if isinstance(one, ast.Name)}
    needed = [
        place.text(one)
        for one in loop.body
        if isinstance(one, ast.Assign)
        and one.lineno > node.lineno
        and isinstance(one.targets[0], ast.Name)
        and one.targets[0].id in names
    ]
    yield place.rewritten(node, "; ".join([*needed, place.text(last), "continue"]))


# Edits that do something after a reduction over ranks which was done before it, or the reverse.
#
# A sum over ranks of values with an addend holds that addend once for each rank.

NOT_LINEAR = {
    *("clamp", "clamp_min", "clamp_max", "sqrt", "rsqrt", "log", "exp", "square", "abs"),
    *("reciprocal", "round", "floor", "ceil", "sigmoid", "tanh", "relu", "normalize"),
}

SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}


def addend_outside(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A number is added to the values of each rank, and should be added to their sum once."""
    if not is_reducer(node, place):
        return
    match node.args:
        case [ast.BinOp(left=left, op=operator, right=right)] if type(operator) in SIGNS:
            sign = SIGNS[type(operator)]
            if _is_number(right):
                reduced = f"{place.text(node.func)}({place.text(left)})"
                yield place.replaced(node, joined(reduced, sign, place.text(right)))
            elif _is_number(left):
                reduced = f"{place.text(node.func)}({place.text(right)})"
                yield place.replaced(node, joined(place.text(left), sign, reduced))
        case _:
            return


def _is_number(node: ast.expr) -> bool:
    """True for a number that is written down, or has the name of a constant."""
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return name.isupper()
        case ast.Attribute(value=ast.Name(id="self")):
            return True
        case _:
            return False


def addend_after(node: ast.Assign, place: EditSite) -> Iterator[Change]:
    """A number is added on each rank, deep inside of what is reduced, and should be added once."""
    if not (isinstance(node.value, ast.Call) and is_reducer(node.value, place)):
        return
    for argument, name in _arguments_with_names(node):
        for inner in ast.walk(argument):
            match inner:
                case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                    if _is_number(right) and inner is not argument:
                        changed = _without(inner, left, node, place)
                        moved = joined(name, SIGNS[type(operator)], place.text(right))
                        yield place.rewritten(node, f"{changed}; {name} = {moved}")
                case _:
                    pass


def _arguments_with_names(node: ast.Assign) -> Iterator[tuple[ast.expr, str]]:
    assert isinstance(node.value, ast.Call)
    arguments = node.value.args
    match node.targets:
        case [ast.Name(id=name)] if len(arguments) == 1:
            yield arguments[0], name
        case [ast.Tuple(elts=names)] if len(names) == len(arguments):
            for argument, target in zip(arguments, names, strict=True):
                if isinstance(target, ast.Name):
                    yield argument, target.id
        case _:
            return


def _without(inner: ast.expr, kept: ast.expr, statement: ast.stmt, place: EditSite) -> str:
    """A statement with a part of it in place of an expression."""
    change = place.replaced(inner, place.text(kept))
    start, end = place.source.span(statement)
    before = place.source.between(start, change.start)
    return f"{before}{change.text}{place.source.between(change.end, end)}"


def limited_after(node: ast.Assign, place: EditSite) -> Iterator[Change]:
    """The values of each rank are limited before their sum over ranks, and not the sum."""
    match node.targets:
        case [ast.Name(id=name)]:
            pass
        case _:
            return
    reduction = _reduction_of(name, node, place)
    if reduction is None:
        return
    start, own_end = place.source.span(node)
    end = place.source.span(reduction)[1]
    between = place.source.between(own_end, end) + place.new_line(node)
    for changed, moved in _done_before(node, name, place):
        yield Change(start, end, f"{changed}{between}{name} = {moved}")


def _done_before(node: ast.Assign, name: str, place: EditSite) -> Iterator[tuple[str, str]]:
    """The assignment without an operation, and the operation of its own."""
    for inner in ast.walk(node.value):
        match inner:
            case ast.Call(func=ast.Attribute(value=receiver, attr=method)):
                if method in NOT_LINEAR and not _is_module(receiver, place):
                    end = place.source.span(receiver)[1]
                    call = place.source.between(end, place.source.span(inner)[1]).lstrip(" )\n")
                    yield _without(inner, receiver, node, place), f"{name}{call}"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                if _is_number(right):
                    moved = joined(name, SIGNS[type(operator)], place.text(right))
                    yield _without(inner, left, node, place), moved
            case _:
                pass


def _is_module(node: ast.expr, place: EditSite) -> bool:
    return place.text(node).split(".")[0] in place.facts.modules


def _reduction_of(name: str, node: ast.stmt, place: EditSite) -> ast.stmt | None:
    """The later statement of the same block that reduces a variable over ranks."""
    block = place.source.block_of(node)
    index = place.source.index_in_block(node)
    for statement in block[index + 1 :]:
        if isinstance(statement, ast.Expr | ast.If) and reduces(statement, name, place):
            return statement
    return None


def around_mean_of_all(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The variance of each rank's values is that around the rank's own mean."""
    match node:
        case ast.Call(func=ast.Attribute(value=values, attr="var"), args=arguments):
            pass
        case _:
            return
    means = [
        one.targets[0].id
        for one in own_nodes(place.scope.function)
        if isinstance(one, ast.Assign)
        and isinstance(one.targets[0], ast.Name)
        and "mean" in one.targets[0].id
        and one.lineno < node.lineno
    ]
    given = [place.text(one) for one in arguments]
    given += [place.text(one) for one in node.keywords if one.arg in ("dim", "keepdim")]
    around = place.parent(node)
    for mean in dict.fromkeys(means):
        squares = f"{place.closed(values)}.square().mean({', '.join(given)})"
        if isinstance(around, ast.Call) and is_reducer(around, place):
            reduced = f"{place.text(around.func)}({squares})"
            yield place.replaced(around, joined(reduced, "-", f"{mean}.square()"))
        else:
            yield place.replaced(node, joined(squares, "-", f"{mean}.square()"))
