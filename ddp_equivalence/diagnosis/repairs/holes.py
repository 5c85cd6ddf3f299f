"""What may stand in the holes of patterns, and what the holes of replacements are filled with.

A function under ``@kind`` is the test of the holes with its name, and one under ``@choice`` gives
the texts that are tried in them, the most likely first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from ddp_equivalence.diagnosis.repairs.patterns import KINDS, Found, choice, kind
from ddp_equivalence.diagnosis.repairs.source import (
    COLLECTIVES,
    Site,
    called_name,
    calls_in,
    likeness,
    own_nodes,
    parameters_of,
)

MOST_GUESSED = 3
MOST_NAMES = 8
MOST_STRINGS = 4
MOST_MOVED = 3

# Calls without which nothing works, or that return no tensor and no number.
NEEDED = {
    *("range", "enumerate", "zip", "super", "isinstance", "getattr", "hasattr", "open", "next"),
    *("parameters", "named_parameters", "items", "get_group", "size", "get_rank", "manual_seed"),
    *("get_world_size", "chunk", "split", "unbind", "init_device_mesh", "filter", "map"),
}
NO_TENSORS = NEEDED | {
    *("list", "tuple", "dict", "set", "sorted", "reversed", "str", "keys", "values", "id", "dim"),
    *("state_dict", "append", "backward", "step", "zero_grad", "to_list", "len", "all_reduce"),
    *("arange", "randperm", "new_group", "broadcast", "device", "named_modules", "modules"),
    "children",
}

# Functions that return their first argument changed, in the same shape.
KEEPS_THE_SHAPE = {
    *("clamp", "normalize", "dropout", "round", "roll", "flip", "nan_to_num", "islice", "where"),
    *("softmax", "log_softmax", "relu", "max", "min", "pad", "sorted", "mul", "div", "getitem"),
}

# Methods with which the sum of values is not the value of the sum.
NOT_LINEAR = {
    *("clamp", "clamp_min", "clamp_max", "sqrt", "rsqrt", "log", "exp", "square", "abs"),
    *("reciprocal", "round", "floor", "ceil", "sigmoid", "tanh", "relu", "normalize"),
}

# Calls with one of these words in their name compute what a name often holds already.
STATISTICS = {
    *("mean", "sum", "max", "min", "amax", "amin", "var", "variance", "std", "norm", "average"),
    *("count", "numel", "len", "size", "number", "total", "moments", "detach"),
}

STARTS = {"start", "offset", "first", "begin", "base"}

# A keyword whose default surprises many people.
SURPRISING_DEFAULTS = {
    "zero_grad": "set_to_none=False",
    "var": "correction=0",
    "std": "correction=0",
    "cross_entropy": "reduction='sum'",
    "nll_loss": "reduction='sum'",
    "mse_loss": "reduction='sum'",
    "binary_cross_entropy_with_logits": "reduction='sum'",
    "requires_grad_": "requires_grad=False",
}

# Variables of the environment, and options, that are mixed up.
MIXED_UP_STRINGS = (
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("sum", "mean", "none"),
)

MARGIN = 1e-4
"""A smaller number only keeps a division from failing."""

_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def last_word(node: Any) -> str:
    """The name of a function or method, without what stands before it."""
    return node if isinstance(node, str) else ast.unparse(node).rpartition(".")[2]


def words(name: str) -> set[str]:
    """The words of a name."""
    return set(name.strip("_").split("_"))


def own_statements(function: ast.AST) -> list[ast.stmt]:
    """The statements of a function; a lambda has none."""
    body = getattr(function, "body", None)
    return body if isinstance(body, list) else []


KINDS |= {
    "variable": lambda site, node, found: isinstance(node, ast.Name),
    "part_number": lambda site, node, found: isinstance(node, ast.Name | ast.Attribute | ast.Call),
    "unsigned": lambda site, node, found: not isinstance(node, ast.UnaryOp),
    "parts": lambda site, node, found: not isinstance(node, ast.List | ast.Tuple),
    "number": lambda site, node, found: type(getattr(node, "value", None)) in (int, float),
    "string": lambda site, node, found: type(getattr(node, "value", None)) is str,
    "order": lambda site, node, found: isinstance(node, ast.Name) and site.may_be_tensor(node),
    "needless": lambda site, node, found: last_word(node) not in NEEDED,
    "shaping": lambda site, node, found: last_word(node) in KEEPS_THE_SHAPE,
    "bending": lambda site, node, found: last_word(node) in NOT_LINEAR,
    "statistic": lambda site, node, found: bool(words(called_name(node)) & STATISTICS),
    "summed": lambda site, node, found: "all_reduce" in calls_in(site.scope.function),
    "result": lambda site, node, found: getattr(site.scope.function, "name", "") == "backward",
    "final": lambda site, node, found: own_statements(site.scope.function)[-1:] == [site.node],
    "index": lambda site, node, found: (
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Name) and site.scope.describes(node.id, "int", "float"))
    ),
}


# Values: where they go, and what they are.


@kind
def tensor(site: Site, node: Any, found: Found) -> bool:
    """A value that may be a tensor."""
    if isinstance(node, ast.Call):
        return called_name(node) not in NO_TENSORS and not called_name(node)[:1].isupper()
    return site.may_be_tensor(node)


@kind
def value(site: Site, node: Any, found: Found) -> bool:
    """A value that may be a tensor and stands as a whole where it is used."""
    if not tensor(site, node, found):
        return False
    match site.parent:
        case ast.Call() as call:
            is_argument = call.func is not node and called_name(call) not in NO_TENSORS
            return is_argument and not site.is_of_a_module(call.func)
        case ast.Tuple() as values:
            return isinstance(site.source.parents[values], ast.Return)
        case ast.Attribute(attr=name):
            return name == "backward"
        case ast.BinOp(op=operator):
            return isinstance(operator, ast.Add | ast.Sub)
        case parent:
            ways = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return
            return isinstance(parent, ways | ast.keyword | ast.Lambda | ast.IfExp)


@kind
def kept(site: Site, node: Any, found: Found) -> bool:
    """A tensor that gets another name, or a place in a container."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or site.is_called(node):
        return False
    match site.parent:
        case ast.Call(func=ast.Attribute(attr="append" | "setdefault" | "insert" | "apply")):
            return site.may_be_tensor(node)
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Dict() | ast.keyword():
            return site.may_be_tensor(node)
    return False


@kind
def fixed(site: Site, node: Any, found: Found) -> bool:
    """A number that is written down, or has the name of a constant."""
    match node:
        case ast.Constant(value=int() | float()) | ast.Attribute(value=ast.Name(id="self")):
            return True
        case ast.Name(id=name):
            return name.isupper()
    return False


@kind
def count(site: Site, node: Any, found: Found) -> bool:
    """A number of examples or elements."""
    shapes = ("len(", ".numel()", ".size(0)", ".shape[0]")
    text = ast.unparse(node)
    is_whole = isinstance(node, ast.Call | ast.Subscript)
    return is_whole and (text.startswith(shapes[0]) or text.endswith(shapes[1:]))


# Names, attributes and numbers.


@kind
def name(site: Site, node: Any, found: Found) -> bool:
    """A local name, which is called only if it is that of a function."""
    if not isinstance(node, ast.Name) or node.id not in site.scope.values:
        return False
    is_function = site.scope.values[node.id] == "function"
    return node.id not in ("self", "cls", "ctx") and (is_function or not site.is_called(node))


@kind
def attribute(site: Site, node: Any, found: Found) -> bool:
    """An attribute that is not called, and no number of the rank."""
    if not isinstance(node, ast.Attribute) or site.is_called(node):
        return False
    of_rank = ast.unparse(node.value).rsplit(".", 1)[-1].strip("_") == "rank"
    return not (of_rank and node.attr in NUMBERS_OF_A_RANK)


NUMBERS_OF_A_RANK = ("rank", "local_rank", "node", "world_size", "local_world_size", "nodes")


@kind
def whole(site: Site, node: Any, found: Found) -> bool:
    """An object of which a part is taken, and not called."""
    text = ast.unparse(node)
    is_part = not site.is_called(site.node) and not site.is_of_a_module(node)
    return is_part and text not in ("self", "ctx", "cls", "super()")


@kind
def receiver(site: Site, node: Any, found: Found) -> bool:
    """An object whose method is called, and the result is used."""
    is_own = ast.unparse(node) in ("self", "super()")
    return not (is_own or site.is_of_a_module(node) or isinstance(site.parent, ast.Expr))


@kind
def argument(site: Site, node: Any, found: Found) -> bool:
    """An argument whose call has a result that is used."""
    is_plain = not isinstance(node, ast.GeneratorExp | ast.Constant)
    return is_plain and not isinstance(site.parent, ast.Expr)


@kind
def assignable(site: Site, node: Any, found: Found) -> bool:
    """An argument or receiver to which a result can be assigned."""
    text = ast.unparse(node)
    if isinstance(node, ast.Name):
        return text in site.scope.values and text not in ("self", "ctx")
    return isinstance(node, ast.Attribute | ast.Subscript) and not site.is_of_a_module(node)


@kind
def rank_number(site: Site, node: Any, found: Found) -> bool:
    """The number of this rank, where something is computed from it."""
    is_rank = ast.unparse(node).split(".")[-1] in ("rank", "get_rank()")
    is_node = isinstance(node, ast.Name | ast.Attribute | ast.Call) and not site.is_called(node)
    return is_rank and is_node and isinstance(site.parent, ast.Call | ast.keyword | ast.BinOp)


@kind
def looped(site: Site, node: Any, found: Found) -> bool:
    """An attribute of self that a loop goes over."""
    is_own = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    return is_own and isinstance(site.parent, ast.For) and site.parent.iter is node


# Functions and statements.


@kind
def reducer(site: Site, node: Any, found: Found) -> bool:
    """A function that returns the sum or mean over ranks of what it is given."""
    is_own = last_word(node) in site.source.reducers and not site.is_of_a_module(node)
    return is_own or last_word(node) in COLLECTIVES


@kind
def reducing(site: Site, node: Any, found: Found) -> bool:
    """A statement that reduces the variable of the pattern in place."""
    reducers = {"all_reduce", *site.source.reducers}
    return isinstance(node, ast.Expr | ast.If) and any(
        isinstance(one, ast.Call)
        and called_name(one) in reducers
        and bool(one.args)
        and ast.unparse(one.args[0]) == ast.unparse(found["variable"])
        for one in ast.walk(node)
    )


@kind
def target(site: Site, node: Any, found: Found) -> bool:
    """What is assigned, and has had a value before."""
    if isinstance(node, ast.Tuple) or getattr(site.scope.function, "name", "") == "__init__":
        return False
    return not isinstance(node, ast.Name) or site.is_bound_elsewhere(node.id)


@kind
def reducible(site: Site, node: Any, found: Found) -> bool:
    """A name or attribute that gets a value that may be a tensor."""
    assigned = getattr(site.node, "value", None)
    is_target = isinstance(node, ast.Name | ast.Attribute)
    is_tensor = is_target and site.scope.describes(ast.unparse(node), "tensor")
    return is_tensor and assigned is not None and tensor(site, assigned, found)


@kind
def statement(site: Site, node: Any, found: Found) -> bool:
    """A statement without which the rest can run."""
    match node:
        case ast.Pass() | ast.Return() | ast.Continue() | ast.Break() | ast.FunctionDef():
            return False
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return site.is_bound_elsewhere(name)
        case ast.Assign(targets=[ast.Tuple()]):
            return False
    return True


@kind
def following(site: Site, node: Any, found: Found) -> bool:
    """A statement that may as well come before the first one of the pattern."""
    one = found["preceding"]
    if isinstance(one, _JUMPS + _DEFINITIONS) or isinstance(node, _JUMPS + _DEFINITIONS):
        return False
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return False
    only_names = all(
        isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        for each in (one, node)
    )
    new = _names(one, ast.Store) & _names(node, ast.Load)
    return not only_names and not (new and isinstance(one, ast.Assign | ast.AnnAssign | ast.With))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, context)}


@kind
def tail(site: Site, node: Any, found: Found) -> bool:
    """The last few statements of a block, which can stand behind it."""
    is_all = not found.get("head") and isinstance(site.node, ast.If | ast.With)
    return 1 <= len(node) <= MOST_MOVED and not is_all and not isinstance(node[-1], _JUMPS)


# Numbers of ranks and of examples.


@choice
def world_size(site: Site, found: Found) -> Iterable[str]:
    """The number of ranks."""
    return [site.world_size] if site.world_size else []


@choice
def all_reduce(site: Site, found: Found) -> Iterable[str]:
    """The function of torch.distributed."""
    called = site.source.imported_as("torch.distributed.all_reduce")
    return [called] if called else []


@choice
def group(site: Site, found: Found) -> Iterable[str]:
    """How the function writes the process group, if it has one."""
    nodes = (one for one in own_nodes(site.scope.function) if isinstance(one, ast.expr))
    texts = (ast.unparse(one) for one in nodes if isinstance(one, ast.Name | ast.Attribute))
    return [one for one in texts if one.split(".")[-1] in ("group", "process_group")][:1]


@choice
def total(site: Site, found: Found, number: str) -> Iterable[str]:
    """A number of this rank, added up over all ranks.

    A function of the file is used where there is one: it may know what to do without ranks.
    """
    made = site.source.imported_as("torch.tensor")
    if made is None:
        return []
    for function in site.source.functions_of_one(site.node):
        if function.rpartition(".")[2] in site.source.reducers:
            body = site.source.functions[function.rpartition(".")[2]]
            if "all_reduce" in calls_in(body) and not _divides(body):
                counted = number.removeprefix("len(").removesuffix(")").removesuffix(".numel(")
                counts = calls_in(body) & {"len", "numel", "size"}
                return [f"{function}({counted if counts else f'{made}({number})'})"]
    names = [one for one in ("count", "number", "n") if one not in site.scope.values]
    calls = all_reduce(site, found)
    return [f"({n} := {made}({number}), {call}({n}))[0]" for n in names[:1] for call in calls]


def _divides(function: ast.FunctionDef) -> bool:
    nodes = list(ast.walk(function))
    has_option = any(isinstance(one, ast.keyword) and one.arg == "op" for one in nodes)
    return has_option or "div_" in calls_in(function) or any(isinstance(n, ast.Div) for n in nodes)


@choice
def other_divisor(site: Site, found: Found, divisor: str) -> Iterable[str]:
    """Other numbers that a sum may have to be divided by."""
    if divisor.endswith(".local_world_size"):  # what is averaged over nodes afterwards
        rank = divisor.removesuffix(".local_world_size")
        yield f"{rank}.world_size / {rank}.nodes"
    yield from world_size(site, found)
    loops = (one for one in ast.walk(site.scope.function) if isinstance(one, ast.For))
    names = (one for loop in loops for one in ast.walk(loop.iter) if isinstance(one, ast.Name))
    lists = dict.fromkeys(one.id for one in names if one.id in site.scope.values)
    yield from [f"len({one})" for one in lists][: MOST_GUESSED - 1]


@choice
def first_row(site: Site, found: Found, rows: str) -> Iterable[str]:
    """The number of the first of this rank's rows among those of all ranks."""
    attributes = site.source.attributes.get(site.source.owner_of_self(site.node), [])
    known = [*site.scope.values, *(f"self.{one}" for one in attributes)]
    names = [one for one in known if set(one.removeprefix("self.").split("_")) & STARTS]
    functions = site.source.functions_of_one(site.node)
    calls = [f"{one}({rows})" for one in functions if set(one.split("_")) & STARTS]
    products = [f"{site.rank} * {rows}"] if site.rank else []
    return [*calls, *dict.fromkeys(names), *products][:MOST_GUESSED]


@choice
def first_row_of_square(site: Site, found: Found) -> Iterable[str]:
    """The same where the rows are those of the first local name in a square."""
    nodes = ast.walk(found["square"])
    names = [one.id for one in nodes if isinstance(one, ast.Name) and one.id in site.scope.values]
    return [text for one in names[:1] for text in first_row(site, found, f"len({one})")]


@choice
def rows_of_a_rank(site: Site, found: Found) -> Iterable[str]:
    """Names of whole numbers."""
    described = site.scope.values.items()
    return [name for name, known in described if known.startswith("int")][:MOST_GUESSED]


@choice
def reducer_here(site: Site, found: Found) -> Iterable[str]:
    """The functions of the file that reduce one value over ranks."""
    listed = site.source.functions_of_one(site.node)
    return [one for one in listed if one.rpartition(".")[2] in site.source.reducers]


# Names, attributes, functions and options.


@choice
def other_name(site: Site, found: Found) -> Iterable[str]:
    """Names whose values are like that of the name."""
    own = found["name"].id
    names = site.scope.names_before(site.line, own)
    known = site.scope.values
    alike = [one for one in names if one != own and known[one] == known[own]]
    return alike[: MOST_NAMES if known[own] else MOST_GUESSED]


@choice
def name_at_hand(site: Site, found: Found) -> Iterable[str]:
    """Names that may hold what the call computes."""
    used = _names(site.node, ast.Load)
    return [
        one
        for one in site.scope.names_before(site.line, called_name(site.node))
        if site.scope.describes(one, "tensor", "int", "float") and one not in used
    ][:MOST_GUESSED]


@choice
def attribute_beside(site: Site, found: Found) -> Iterable[str]:
    """Other attributes of the same object that hold the like."""
    node = found["attribute"] if "attribute" in found else found["looped"]
    owner, known = ast.unparse(node.value), site.scope.values
    own = known.get(f"{owner}.{node.attr}", "")
    listed = [*site.source.attributes.get(site.source.owner(node.value), [])]
    if owner == "self":
        listed += [one.removeprefix("self.") for one in known if one.startswith("self.")]
    listed += [one for fields in site.source.fields if node.attr in fields for one in fields]
    others = [one for one in dict.fromkeys(listed) if one != node.attr and one[:2] != "__"]
    alike = [one for one in others if not own or known.get(f"{owner}.{one}", own) == own]
    alike.sort(key=lambda one: -likeness(node.attr, one))
    return [f"{owner}.{one}" for one in alike[:MOST_STRINGS]]


@choice
def mask_beside(site: Site, found: Found) -> Iterable[str]:
    """Other masks: attributes of the same object, or names with the same shape."""
    node = found["mask"]
    if not isinstance(site.parent, ast.Assign | ast.Subscript | ast.BinOp):
        return
    if isinstance(node, ast.Attribute) and not site.is_called(node):
        owner = ast.unparse(node.value)
        if owner != "self" and not site.is_of_a_module(node):
            others = site.source.attributes.get(site.source.owner(node.value), [])
            yield from [
                f"{owner}.{node.attr} & {owner}.{one}" for one in others if one != node.attr
            ][:MOST_STRINGS]
    elif isinstance(node, ast.Name):
        kind_of, _, sizes = site.scope.values.get(node.id, "")[len("tensor ") :].partition(" ")
        for one in site.scope.names_before(site.line, node.id) if sizes else ():
            if one != node.id and site.scope.values[one] == f"tensor bool {sizes}":
                yield f"{node.id} {'&' if kind_of == 'bool' else '*'} {one}"


@choice
def own_function(site: Site, found: Found) -> Iterable[str]:
    """Functions of the file that take one argument."""
    around = ast.unparse(site.parent.func) if isinstance(site.parent, ast.Call) else ""
    names = [one for one in site.source.functions_of_one(site.node) if one != around]
    return [one for one in names if one.split(".")[-1] != called_name(site.node)][:MOST_GUESSED]


@choice
def expected_option(site: Site, found: Found) -> Iterable[str]:
    """The keyword that many people take for the default."""
    option = SURPRISING_DEFAULTS.get(called_name(site.node))
    return [option] if option and not _gives(site.node, option.split("=")[0]) else []


@choice
def own_option(site: Site, found: Found) -> Iterable[str]:
    """An option of a function of the file that the call does not give.

    A truth value is given as the other one, and what is None by default as the local name that is
    called like the parameter.
    """
    function = site.source.functions.get(called_name(site.node))
    if function is None:
        return
    given = function.args
    positional = zip(
        reversed([*given.posonlyargs, *given.args]), reversed(given.defaults), strict=False
    )
    for option, default in [*positional, *zip(given.kwonlyargs, given.kw_defaults, strict=True)]:
        if isinstance(default, ast.Constant) and not _gives(site.node, option.arg):
            if isinstance(default.value, bool):
                yield f"{option.arg}={not default.value}"
            elif default.value is None and option.arg in site.scope.values:
                yield f"{option.arg}={option.arg}"


def _gives(node: ast.AST, option: str) -> bool:
    return any(one.arg in (option, None) for one in getattr(node, "keywords", ()))


@choice
def dotted(site: Site, found: Found) -> Iterable[str]:
    """A prefix, or each of several, with a dot behind it."""
    prefix = found["prefix"]
    given = prefix.elts if isinstance(prefix, ast.Tuple) else [prefix]
    constants = [one.value for one in given if isinstance(one, ast.Constant)]
    if len(constants) == len(given):
        texts = [repr(f"{one!s}.") for one in constants]
        return texts if given == [prefix] else [f"({', '.join(texts)},)"]
    text = ast.unparse(prefix)
    return [f'f"{{{text}}}."', f"tuple((f'{{one}}.' for one in {text}))"] if '"' not in text else []


@choice
def times_gradient(site: Site, found: Found) -> Iterator[str]:
    """The returned gradients times the one that the backward method is given."""
    function, returned = site.scope.function, found["result"]
    for given in parameters_of(function)[1:]:
        given += "[0]" if function.args.vararg and given == function.args.vararg.arg else ""
        if isinstance(returned, ast.Tuple):
            texts = [
                ast.unparse(one)
                if isinstance(one, ast.Constant | ast.Starred)
                else f"{given} * ({ast.unparse(one)})"
                for one in returned.elts
            ]
            yield f"({', '.join(texts)},)"
        elif ast.unparse(returned).endswith(".saved_tensors"):
            yield f"tuple(({given} * one for one in {ast.unparse(returned)}))"
        elif site.may_be_tensor(returned) and given not in ast.unparse(returned).split():
            yield f"{given} * ({ast.unparse(returned)})"


@choice
def other_number(site: Site, found: Found) -> Iterable[str]:
    """Numbers near one, and those that have a meaning of their own."""
    given = found["number"].value
    if isinstance(given, int):
        negative = isinstance(site.parent, ast.UnaryOp)
        near = (given + 1, given - 1)
        others = (1, 0, *near) if negative else (*near, -given, 0, 1)
        return [str(one) for one in others if one != given]
    rest = [round(1 - given, 12)] if MARGIN < given < 1 - MARGIN else []
    return [repr(one) for one in (1.0, 0.0, *rest) if one != given and abs(given) > MARGIN]


@choice
def other_string(site: Site, found: Found) -> Iterable[str]:
    """Strings that are mixed up with one, listed beside it, or used where it is used."""
    node = found["string"]
    known = [one for texts in MIXED_UP_STRINGS if node.value in texts for one in texts]
    listed = [site.source.strings.get(use, []) for use in ("Tuple", "List", "Dict", "Set")]
    beside = [one for texts in listed if node.value in texts for one in texts]
    used = site.source.strings[site.source.use_of(node)]
    return [repr(one) for one in [*known, *beside, *used] if one != node.value][:MOST_STRINGS]
