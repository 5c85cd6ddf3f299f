"""All kinds of edits, the most likely to repair a step first.

To add one: write a function that proposes changes for a type of node, in the file of its topic,
and put it into this table. Its docstring says why people make the mistake.
"""

from __future__ import annotations

import ast
from typing import Any

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs import operators
from ddp_equivalence.diagnosis.repairs.change import Rule

RULES: tuple[Rule[Any], ...] = (
    Rule(EditKind.COMPARISON, ast.Compare, operators.another_comparison),
    Rule(EditKind.OPERATOR, ast.BinOp, operators.another_operator),
    Rule(EditKind.OPERAND_LEFT_OUT, ast.BinOp, operators.operand_left_out),
    Rule(EditKind.CONDITION_LEFT_OUT, ast.BoolOp, operators.condition_left_out),
    Rule(EditKind.CONDITION, ast.BoolOp, operators.and_or),
    Rule(EditKind.SIGN, ast.UnaryOp, operators.sign_left_out),
    Rule(EditKind.BRANCH, ast.IfExp, operators.one_branch),
    Rule(EditKind.ROUNDED_UP, ast.BinOp, operators.rounded_up),
    Rule(EditKind.OPERANDS_SWAPPED, ast.BinOp, operators.operands_swapped),
)
