"""The edits of every mistake in the table are made where they can repair something."""

from __future__ import annotations

import pytest

from ddp_equivalence.diagnosis.repairs.patterns import CHOICES
from ddp_equivalence.diagnosis.repairs.table import MISTAKES
from tests.package.diagnosis.repairs.edited import HEAD, body, sources, written

TOTAL_OF_Y = "(count := torch.tensor(len(y)), dist.all_reduce(count))[0]"
RANK = "(dist.get_rank() if dist.is_initialized() else 0)"

IN_A_FUNCTION = (
    ("k = x.startswith('item')", "k = x.startswith('item.')"),
    ("k = x.startswith(('a', 'b'))", "k = x.startswith(('a.', 'b.'))"),
    ("k = x.startswith(y)", "k = x.startswith(f'{y}.')"),
    ("k = x.startswith(y)", "k = x.startswith(tuple(f'{one}.' for one in y))"),
    ("g(part.b)\nk = part.a", "g(part.b)\nk = part.a & part.b"),
    ("g(x, keep=True)", "g(x, keep=False)"),
    ("for i, p in enumerate(x): g(i)", f"for i, p in enumerate(x, {RANK} * len(x)): g(i)"),
    (
        "k = torch.ones_like(x).fill_diagonal_(0)",
        f"k = torch.ones_like(x).fill_diagonal_(0).roll({RANK} * len(x), 1)",
    ),
    ("k = torch.arange(y)", f"k = torch.arange(y) + {RANK} * y"),
    ("start = 3\nk = torch.arange(y)", "start = 3\nk = torch.arange(y) + start"),
    ("k = torch.cat(part)", "k = torch.stack(part, 1).flatten(0, 1)"),
    ("k = torch.cat(x, dim=1)", "k = torch.stack(x, 2).flatten(1, 2)"),
    ("k = torch.stack(x, 1).flatten(0, 1)", "k = torch.cat(x)"),
    ("k = x.chunk(y)[order]", "k = x.unflatten(0, (3, y, -1))[:, order].flatten(0, 1)"),
    ("k = x.view(y, 4, -1)", "k = x.view(4, y, -1).transpose(0, 1)"),
    ("k = x.view(y, 4, -1)", "k = x.view(y, -1, 4).transpose(1, 2)"),
    ("k = x[:y]", "k = x[-y:]"),
    ("x[..., :y] += part", "x[..., -y:] += part"),
    ("k = x[y + 1:]", "k = x[:-(y + 1)]"),
    ("k = x[-y:]", "k = x[:y]"),
    ("k = x / len(y)", f"k = x * dist.get_world_size() / {TOTAL_OF_Y}"),
    ("k = x / (len(y) * dist.get_world_size())", f"k = x / {TOTAL_OF_Y}"),
    (
        "k = y.mean(0)\ndist.all_reduce(k)",
        f"k = y.sum(0) * dist.get_world_size() / {TOTAL_OF_Y}\ndist.all_reduce(k)",
    ),
    (
        "k = x.sum().clamp(min=1)\nif y:\n    dist.all_reduce(k)\ng(k)",
        "k = x.sum()\nif y:\n    dist.all_reduce(k)\nk = k.clamp(min=1)\ng(k)",
    ),
    ("k = x.sum() + 1\ndist.all_reduce(k)", "k = x.sum()\ndist.all_reduce(k)\nk = k + 1"),
    ("x /= rank.local_world_size", "x /= rank.world_size / rank.nodes"),
    ("x.div_(y)", "x.div_(dist.get_world_size())"),
    ("for p in part:\n    k = p / y", "for p in part:\n    k = p / len(part)"),
    ("k = x.sum()", "k = x.sum(); dist.all_reduce(k)"),
    ("k = x.sum()", "k = x.sum(); dist.all_reduce(k); k /= dist.get_world_size()"),
    ("k = x.sum()\ng(y.group)", "k = x.sum(); dist.all_reduce(k, group=y.group)\ng(y.group)"),
    ("k = (x + 1) // y", "k = -(-(x + 1) // y)"),
    (
        "dist.all_gather(part, x, group=y)",
        "import torch.distributed.nn.functional as differentiable; "
        "part = differentiable.all_gather(x, group=y)",
    ),
    ("for i in x:\n    return", "for i in x:\n    continue"),
    ("for i in x:\n    continue", "for i in x:\n    break"),
    ("if x:\n    return\nx.g()", "if x:\n    pass\nx.g()"),
    ("with x.no_sync():\n    g()", "if True:\n    g()"),
    ("x.zero_grad()", "x.zero_grad(set_to_none=False)"),
    ("k = x.detach()", "k = x.detach().requires_grad_()"),
    ("k = x[order]", "k = x[order.argsort()]"),
    ("k = x.get('a')\nj = x.get('b')", "k = x.get('a')\nj = x.get('a')"),
    ("n = ('in', 'out')\ng(n['in'])", "n = ('in', 'out')\ng(n['out'])"),
    ("k = x['LOCAL_RANK']", "k = x['RANK']"),
    ("k = x.sum()", "k = x.mean()"),
    ("k = list(x)", "k = sorted(x)"),
    ("g(model.parameters())", "g(model.state_dict().values())"),
    ("x[order] = y", "x[order] += y"),
    ("x += y", "x = y"),
    ("x[order] += y", "x.index_add_(0, order, y)"),
    ("k = x < y", "k = x <= y"),
    ("k = x in y", "k = x not in y"),
    ("k = x // y == 1", "k = x % y == 1"),
    ("k = x * (y + 1)", "k = x / (y + 1)"),
    ("x.clip()\ny.average()", "y.average()\nx.clip()"),
    ("if x:\n    y.g()\nx.g()", "x.g()\nif x:\n    y.g()"),
    (
        "for p in x:\n    p.g()\n    y.g()\n    y.h()",
        "for p in x:\n    p.g()\n    pass\ny.g()\ny.h()",
    ),
    ("g(group=y, op=x)", "g(op=x)"),
    ("g(x)", "x = g(x)"),
    ("x.div(2)", "x = x.div(2)"),
    ("k = x * y", "return x * y"),
    ("mean = x.g()\nk = x - x.mean(0)", "mean = x.g()\nk = x - mean"),
    ("k = x.div_(2)", "k = x.div(2)"),
    ("k = x and y == 0", "k = x"),
    ("k = x and y", "k = x or y"),
    ("if x is None:\n    y.g()", "if not x is None:\n    y.g()"),
    ("while x:\n    y.g()", "while True:\n    y.g()"),
    ("k = x * (y + 1)", "k = x * y + 1"),
    ("k = x - y / part", "k = (x - y) / part"),
    ("k = (x + y).float() * 2", "k = (x + y) * 2"),
    ("k = torch.clamp(x, min=1)", "k = x"),
    ("k = (x + y) * 2", "k = x * 2"),
    ("if x:\n    y.g()\ny.h()", "pass\ny.h()"),
    ("(x + y).backward()", "((x + y) / dist.get_world_size()).backward()"),
    ("k = x - y", "k = x - y * dist.get_world_size()"),
    ("k = x.mean(0)", "k = x.mean(-1)"),
    ("k = 0.9 * x", "k = 0.1 * x"),
    ("k = x[y:part]", "k = x[y + 1:part]"),
    ("k = x[:, ::2]", "k = x[:, :]"),
    ("k = x['a'] != -100", "k = x['a'][:, 1:] != -100"),
    ("k = x[1:]", "k = x"),
    ("k = part * 2", "k = x * 2"),
    ("model.kept = x.grad", "model.kept = x.grad.clone()"),
    ("k = x[y]", "k = x[y + 1]"),
    ("k = x[y.shape]", "k = x[y]"),
    ("k = not x", "k = x"),
    ("for i in range(1, y):\n    x.g(i)", "for i in range(1, y - 1):\n    x.g(i)"),
    ("k = x * y", "k = (x * y).detach()"),
    ("g(x, y, 1)", "g(x, 1)"),
    ("g(x, y, 1)", "g(y, x, 1)"),
    ("k = (x + 1) / y", "k = y / (x + 1)"),
)

# A file with a function that adds up over ranks.
SUMS = """\
def total(value):
    dist.all_reduce(value)
    return value
def balance(one, other):
    return one / other
def f(x, y):
    k = balance(total(x), 1)
    {}
"""

# A function with options.
OPTIONS = """\
def judge(x, *, strict=False, mask=None):
    return x
def f(x, mask):
    {}
"""

TRAINER = """\
class Trainer:
    def __init__(self, model, ema, near, far, count):
        self.model, self.ema, self.near, self.far, self.count = model, ema, near, far, count
    def averaged(self, value):
        return value / self.count
    def total(self, value):
        return value * self.count
    def run(self, x):
        a = self.averaged(x), self.total(x)
        {}
"""

BACKWARD = """\
class Same(torch.autograd.Function):
    @staticmethod
    def backward(ctx, *grads):
        {}
"""

IN_A_FILE = (
    (OPTIONS, "k = judge(x)", "k = judge(x, strict=True)"),
    (OPTIONS, "k = judge(x)", "k = judge(x, mask=mask)"),
    (BACKWARD, "return ctx.a, None", "return grads[0] * ctx.a, None"),
    (SUMS, "k = x / len(y)", "k = x / total(torch.tensor(len(y)))"),
    (
        SUMS,
        "return total(x.mean()) / y",
        "return total(x.sum()) / total(torch.tensor(x.numel()))",
    ),
    (SUMS, "k = total(x.h() + 1)", "k = total(x.h()) + 1"),
    (
        SUMS,
        "k = total(torch.tensor(x.numel() - 1))",
        "k = total(torch.tensor(x.numel())); k = k - 1",
    ),
    (SUMS, "k = balance(x, y)", "k = balance(total(x), total(y))"),
    (TRAINER, "g(self.near)", "g(self.far)"),
    (TRAINER, "for p in self.near: g(p)", "for p in self.near + self.far: g(p)"),
    (TRAINER, "return x + 1", "return self.averaged(x + 1)"),
)


@pytest.mark.parametrize(("before", "after"), IN_A_FUNCTION)
def test_an_edit_is_made_in_a_function(before: str, after: str) -> None:
    assert written(body(after)) in sources(body(before))


@pytest.mark.parametrize(("around", "before", "after"), IN_A_FILE)
def test_an_edit_is_made_in_a_file(around: str, before: str, after: str) -> None:
    assert written(HEAD + around.format(after)) in sources(HEAD + around.format(before))


def test_a_tensor_is_masked_by_a_mask_of_its_shape() -> None:
    values = {4: {"x": "tensor float64 3", "y": "tensor bool 3", "part": "tensor bool 4"}}
    edited = sources(body("k = x"), values=values)
    assert written(body("k = x * y")) in edited
    assert written(body("k = x * part")) not in edited


def test_the_number_of_the_rank_is_multiplied_by_a_number_of_rows() -> None:
    values = {4: {"n": "int", "rank": "Rank"}}
    edited = sources(body("n = len(x)\ng(rank.rank)"), values=values)
    assert written(body("n = len(x)\ng(rank.rank * n)")) in edited


def test_an_option_that_was_given_is_not_given_again() -> None:
    edited = sources(HEAD + OPTIONS.format("k = judge(x, strict=False, mask=None)"))
    assert not any(text.count("strict=") > 2 for text in edited)


def test_the_edits_of_every_mistake_are_made_here() -> None:
    files = [body(before) for before, _ in IN_A_FUNCTION]
    files += [HEAD + around.format(before) for around, before, _ in IN_A_FILE]
    made = {edit.place for file in files for edit in sources(file).values()}
    assert [one.why for place, one in enumerate(MISTAKES) if place not in made] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.why)
def test_every_hole_of_a_replacement_can_be_filled(mistake: object) -> None:
    assert all(pattern.choices <= CHOICES.keys() for pattern in mistake.patterns)  # type: ignore[attr-defined]
