"""Every kind of edit is made where it can repair something."""

from __future__ import annotations

import pytest

from ddp_equivalence.case.edit import EditKind as Kind
from ddp_equivalence.diagnosis.repairs.find_repairs import RULES
from tests.package.diagnosis.repairs import rows_of_distributed_code
from tests.package.diagnosis.repairs.edited import HEAD, body, sources

OF_A_FUNCTION = (
    *rows_of_distributed_code.IN_A_FUNCTION,
    (Kind.ROUNDED_UP, "k = x // y", "k = -(-x // y)"),
    (Kind.ROUNDED_UP, "k = (x + 1) // y", "k = -(-(x + 1) // y)"),
    (
        Kind.WITH_GRADIENT,
        "dist.all_reduce(x)",
        "import torch.distributed.nn.functional as differentiable; "
        "x = differentiable.all_reduce(x)",
    ),
    (
        Kind.WITH_GRADIENT,
        "dist.all_gather(part, x, group=y)",
        "import torch.distributed.nn.functional as differentiable; "
        "part = differentiable.all_gather(x, group=y)",
    ),
    (Kind.JUMP, "for i in x:\n    return", "for i in x:\n    continue"),
    (Kind.JUMP, "for i in x:\n    break", "for i in x:\n    continue"),
    (Kind.JUMP, "for i in x:\n    continue", "for i in x:\n    break"),
    (Kind.JUMP, "if x:\n    return\nx.g()", "if x:\n    pass\nx.g()"),
    (Kind.CONTEXT_LEFT_OUT, "with x.no_sync():\n    g()", "if True:\n    g()"),
    (Kind.KEYWORD_ADDED, "x.zero_grad()", "x.zero_grad(set_to_none=False)"),
    (Kind.KEYWORD_ADDED, "k = x.var(0)", "k = x.var(0, correction=0)"),
    (Kind.REQUIRES_GRAD, "k = x.detach()", "k = x.detach().requires_grad_()"),
    (Kind.PERMUTATION_INVERTED, "k = x[order]", "k = x[order.argsort()]"),
    (Kind.OFFSET, "k = torch.arange(y)", "k = torch.arange(y) + dist.get_rank() * y"),
    (Kind.OFFSET, "start = 3\nk = torch.arange(y)", "start = 3\nk = torch.arange(y) + start"),
    (Kind.OFFSET, "n = len(x)\ng(rank.rank)", "n = len(x)\ng(rank.rank * n)"),
    (Kind.STRING, 'k = x.get("a")\nj = x.get("b")', 'k = x.get("a")\nj = x.get("a")'),
    (Kind.STRING, 'n = ("in", "out")\ng(n["in"])', 'n = ("in", "out")\ng(n["out"])'),
    (Kind.STRING, 'k = x["LOCAL_RANK"]', 'k = x["RANK"]'),
    (Kind.METHOD, "k = x.sum()", "k = x.mean()"),
    (Kind.METHOD, "k = x.repeat(2)", "k = x.repeat_interleave(2)"),
    (Kind.METHOD, "k = list(x)", "k = sorted(x)"),
    (Kind.METHOD, "k = (x - y).square()", "k = (x - y).abs()"),
    (Kind.TENSORS_OF_MODULE, "g(model.parameters())", "g(model.state_dict().values())"),
    (Kind.TENSORS_OF_MODULE, "g(model.state_dict().values())", "g(model.parameters())"),
    (Kind.ADDED_UP, "x[order] = y", "x[order] += y"),
    (Kind.ADDED_UP, "x += y", "x = y"),
    (Kind.ADDED_UP, "x /= y", "x *= y"),
    (Kind.ADDED_UP, "x[order] += y", "x.index_add_(0, order, y)"),
    (Kind.DIVISOR, "x /= y", "x /= dist.get_world_size()"),
    (Kind.DIVISOR, "x.div_(y)", "x.div_(dist.get_world_size())"),
    (
        Kind.DIVISOR,
        "for p in part:\n    k = p / y",
        "for p in part:\n    k = p / len(part)",
    ),
    (Kind.COMPARISON, "k = x < y", "k = x <= y"),
    (Kind.COMPARISON, "k = x in y", "k = x not in y"),
    (Kind.OPERATOR, "k = x // y == 1", "k = x % y == 1"),
    (Kind.OPERATOR, "k = x * (y + 1)", "k = x / (y + 1)"),
    (Kind.STATEMENTS_SWAPPED, "x.clip()\ny.average()", "y.average()\nx.clip()"),
    (
        Kind.STATEMENTS_SWAPPED,
        "if x:\n    y.g()\nx.g()",
        "x.g()\nif x:\n    y.g()",
    ),
    (
        Kind.MOVED_OUT,
        "for p in x:\n    p.g()\n    y.g()\n    y.h()",
        "for p in x:\n    p.g()\n    pass\ny.g()\ny.h()",
    ),
    (Kind.KEYWORD_LEFT_OUT, "g(x, group=y)", "g(x)"),
    (Kind.KEYWORD_LEFT_OUT, "g(group=y, op=x)", "g(op=x)"),
    (Kind.RESULT_USED, "g(x)", "x = g(x)"),
    (Kind.RESULT_USED, "x.div(2)", "x = x.div(2)"),
    (Kind.RESULT_USED, "k = x * y", "return x * y"),
    (Kind.CALL_BY_NAME, "mean = x.g()\nk = x - x.mean(0)", "mean = x.g()\nk = x - mean"),
    (Kind.IN_PLACE, "k = x.div_(2)", "k = x.div(2)"),
    (Kind.IN_PLACE, "x.div(2)", "x.div_(2)"),
    (Kind.CONDITION_LEFT_OUT, "k = x and y == 0", "k = x"),
    (Kind.PARENTHESES, "k = x * (y + 1)", "k = x * y + 1"),
    (Kind.PARENTHESES, "k = x - y / part", "k = (x - y) / part"),
    (Kind.REDUCED, "k = x.sum()", "k = x.sum(); dist.all_reduce(k)"),
    (
        Kind.REDUCED,
        "k = x.sum()",
        "k = x.sum(); dist.all_reduce(k); k /= dist.get_world_size()",
    ),
    (Kind.CALL_LEFT_OUT, "k = x.detach()", "k = x"),
    (Kind.CALL_LEFT_OUT, "k = (x + y).float() * 2", "k = (x + y) * 2"),
    (Kind.CALL_LEFT_OUT, "k = g(x)", "k = x"),
    (Kind.CALL_LEFT_OUT, "k = torch.clamp(x, min=1)", "k = x"),
    (Kind.OPERAND_LEFT_OUT, "k = (x + y) * 2", "k = x * 2"),
    (Kind.OPERAND_LEFT_OUT, "k = (x + y) * 2", "k = x + y"),
    (Kind.STATEMENT_LEFT_OUT, "x.g()", "pass"),
    (Kind.STATEMENT_LEFT_OUT, "if x:\n    y.g()\ny.h()", "pass\ny.h()"),
    (Kind.OVER_WORLD_SIZE, "return x + y", "return (x + y) / dist.get_world_size()"),
    (Kind.OVER_WORLD_SIZE, "(x + y).backward()", "((x + y) / dist.get_world_size()).backward()"),
    (Kind.TIMES_WORLD_SIZE, "k = x - y", "k = x - y * dist.get_world_size()"),
    (Kind.SUBSCRIPT_LEFT_OUT, "k = x[1:]", "k = x"),
    (Kind.CONSTANT, "k = x.mean(0)", "k = x.mean(1)"),
    (Kind.CONSTANT, "k = x.mean(0)", "k = x.mean(-1)"),
    (Kind.CONSTANT, "k = x.roll(shifts=-1)", "k = x.roll(shifts=-2)"),
    (Kind.CONSTANT, "k = 0.9 * x", "k = 0.1 * x"),
    (Kind.SLICE, "k = x[y:part]", "k = x[y + 1:part]"),
    (Kind.SLICE, "k = x[:part]", "k = x[:part - 1]"),
    (Kind.SLICE, "k = x[:, ::2]", "k = x[:, :]"),
    (Kind.SLICE, 'k = x["a"] != -100', 'k = x["a"][:, 1:] != -100'),
    (Kind.SLICE, "k = x.ne(y)", "k = x[:, 1:].ne(y)"),
    (Kind.NAME, "k = part * 2", "k = x * 2"),
    (Kind.CLONED, "model.kept = x.grad", "model.kept = x.grad.clone()"),
    (Kind.INDEX, "k = x[y]", "k = x[y + 1]"),
    (Kind.ATTRIBUTE_LEFT_OUT, "k = x[y.shape]", "k = x[y]"),
    (Kind.SIGN, "k = not x", "k = x"),
    (Kind.RANGE, "for i in range(y):\n    x.g(i)", "for i in range(y + 1):\n    x.g(i)"),
    (Kind.RANGE, "for i in range(1, y):\n    x.g(i)", "for i in range(1, y - 1):\n    x.g(i)"),
    (Kind.CONDITION, "k = x and y", "k = x or y"),
    (Kind.CONDITION, "if x is None:\n    y.g()", "if not (x is None):\n    y.g()"),
    (Kind.CONDITION, "while x:\n    y.g()", "while True:\n    y.g()"),
    (Kind.DETACHED, "k = x * y", "k = (x * y).detach()"),
    (Kind.ARGUMENT_LEFT_OUT, "g(x, y)", "g(x)"),
    (Kind.ARGUMENTS_SWAPPED, "g(x, y, 1)", "g(y, x, 1)"),
    (Kind.OPERANDS_SWAPPED, "k = (x + 1) / y", "k = y / (x + 1)"),
)

TRAINER = """\
class Trainer:
    def __init__(self, model, ema, near: list, far: list, count: int):
        self.model = model
        self.ema = ema
        self.near = near
        self.far = far
        self.count = count
    def averaged(self, value):
        return value / self.count
    def total(self, value):
        return value * self.count
    def own(self):
        return [self.near]
    def run(self, x):
        self.ema.train()
        a = self.averaged(x), self.total(x), self.own()
        {}
"""

FUNCTION = """\
class Same(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        {}
"""

OF_A_CLASS = (
    *rows_of_distributed_code.IN_A_FILE,
    (Kind.OWN_ATTRIBUTE, TRAINER, "g(self.near)", "g(self.far)"),
    (Kind.OWN_ATTRIBUTE, TRAINER, "self.model.train()", "self.ema.train()"),
    (Kind.LISTS_JOINED, TRAINER, "for p in self.near: g(p)", "for p in self.near + self.far: g(p)"),
    (Kind.METHOD, TRAINER, "k = x.total()", "k = self.total(x)"),
    (Kind.FUNCTION_APPLIED, TRAINER, "return x + 1", "return self.averaged(x + 1)"),
    (Kind.TIMES_ARGUMENT, FUNCTION, "return ctx.kept.T", "return grad * ctx.kept.T"),
    (
        Kind.TIMES_ARGUMENT,
        FUNCTION,
        "return ctx.a, ctx.b, None",
        "return grad * ctx.a, grad * ctx.b, None",
    ),
)


@pytest.mark.parametrize(("kind", "before", "after"), OF_A_FUNCTION)
def test_an_edit_is_made_in_a_function(kind: Kind, before: str, after: str) -> None:
    edited = sources(body(before))
    assert edited.get(body(after)) == kind, _like(edited, kind)


@pytest.mark.parametrize(("kind", "around", "before", "after"), OF_A_CLASS)
def test_an_edit_is_made_in_a_class(kind: Kind, around: str, before: str, after: str) -> None:
    edited = sources(HEAD + around.format(before))
    assert edited.get(HEAD + around.format(after)) == kind, _like(edited, kind)


def test_a_tensor_is_masked_by_a_mask_of_its_shape() -> None:
    values = {4: {"x": "tensor float64 3", "y": "tensor bool 3", "part": "tensor bool 4"}}
    edited = sources(body("k = x"), values=values)
    assert edited[body("k = x * y")] == Kind.MASKED_TOO
    assert body("k = x * part") not in edited


def test_an_option_that_was_given_is_not_given_again() -> None:
    options = rows_of_distributed_code.OPTIONS
    edited = sources(HEAD + options.format("k = judge(x, strict=False, mask=None)"))
    assert Kind.OPTION_GIVEN not in edited.values()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.changes.__name__)
def test_every_rule_says_why_people_make_the_mistake(rule: object) -> None:
    assert rule.changes.__doc__.endswith(".")  # type: ignore[attr-defined]


def test_every_kind_is_tried_here_and_has_a_rule() -> None:
    tried = {row[0] for row in (*OF_A_FUNCTION, *OF_A_CLASS)}
    assert tried == {rule.kind for rule in RULES} == set(Kind)


def _like(edited: dict[str, Kind], kind: Kind) -> str:
    return "\n".join(text for text, other in edited.items() if other == kind)
