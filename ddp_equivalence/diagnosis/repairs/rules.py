"""All kinds of edits, the most likely to repair a step first.

To add one: write a function that proposes changes for a type of node, in the file of its topic,
and put it into this table. Its docstring says why people make the mistake.
"""

from __future__ import annotations

import ast
from typing import Any

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs import (
    blocks,
    calls,
    constants,
    indices,
    names,
    operators,
    statements,
    wraps,
)
from ddp_equivalence.diagnosis.repairs.change import Rule

RULES: tuple[Rule[Any], ...] = (
    # What is proposed in few places, where it is often right.
    Rule(EditKind.RANK_ATTRIBUTE, ast.Attribute, names.another_number_of_the_rank),
    Rule(EditKind.ROUNDED_UP, ast.BinOp, operators.rounded_up),
    Rule(EditKind.TIMES_ARGUMENT, ast.expr, wraps.times_an_argument),
    Rule(EditKind.WRITTEN_BACK, ast.stmt, statements.written_back),
    Rule(EditKind.WRITTEN_BACK, ast.Expr, statements.copied_into_a_copy),
    Rule(EditKind.LAST_ONE_TOO, ast.Compare, operators.last_one_too),
    Rule(EditKind.JUMP, ast.stmt, statements.jump),
    Rule(EditKind.CONTEXT_LEFT_OUT, ast.With, blocks.context_left_out),
    Rule(EditKind.KEYWORD_ADDED, ast.Call, calls.keyword_added),
    Rule(EditKind.WITH_GRADIENT, ast.Expr, statements.reduced_with_gradient),
    Rule(EditKind.REQUIRES_GRAD, ast.Call, wraps.requires_grad),
    Rule(EditKind.PERMUTATION_INVERTED, ast.Subscript, indices.permutation_inverted),
    Rule(EditKind.OFFSET, ast.Call, wraps.offset_of_the_rank),
    Rule(EditKind.OFFSET, ast.expr, wraps.rank_times_count),
    Rule(EditKind.STRING, ast.Constant, constants.another_string),
    # What stands on the line is right but for one sign, one name of a function, or its order.
    Rule(EditKind.METHOD, ast.Attribute, calls.mixed_up),
    Rule(EditKind.METHOD, ast.Name, calls.mixed_up_name),
    Rule(EditKind.METHOD, ast.Call, calls.function_for_method),
    Rule(EditKind.METHOD, ast.Call, calls.another_function_of_the_file),
    Rule(EditKind.METHOD, ast.Call, calls.tensors_of_a_module),
    Rule(EditKind.METHOD, ast.Call, calls.own_function_without_arguments),
    Rule(EditKind.ADDED_UP, ast.Assign, statements.added_up),
    Rule(EditKind.ADDED_UP, ast.AugAssign, statements.assigned),
    Rule(EditKind.ADDED_UP, ast.AugAssign, statements.equal_indices_added),
    Rule(EditKind.DIVISOR, ast.expr, wraps.another_divisor),
    Rule(EditKind.COMPARISON, ast.Compare, operators.another_comparison),
    Rule(EditKind.OPERATOR, ast.BinOp, operators.another_operator),
    Rule(EditKind.STATEMENTS_SWAPPED, ast.stmt, blocks.swapped),
    Rule(EditKind.MOVED_OUT, ast.stmt, blocks.moved_out),
    Rule(EditKind.KEYWORD_LEFT_OUT, ast.Call, calls.keyword_left_out),
    Rule(EditKind.RESULT_USED, ast.Expr, statements.result_used),
    Rule(EditKind.RESULT_USED, ast.stmt, statements.returned),
    Rule(EditKind.CALL_BY_NAME, ast.Call, names.name_for_call),
    Rule(EditKind.IN_PLACE, ast.Attribute, calls.in_place),
    Rule(EditKind.CONDITION_LEFT_OUT, ast.BoolOp, operators.condition_left_out),
    Rule(EditKind.LISTS_JOINED, ast.For, blocks.other_list_too),
    Rule(EditKind.PARENTHESES, ast.BinOp, operators.parentheses_moved),
    # Something is missing, or one too many.
    Rule(EditKind.REDUCED, ast.stmt, statements.reduced),
    Rule(EditKind.CALL_LEFT_OUT, ast.Call, calls.call_left_out),
    Rule(EditKind.OPERAND_LEFT_OUT, ast.BinOp, operators.operand_left_out),
    Rule(EditKind.STATEMENT_LEFT_OUT, ast.stmt, statements.left_out),
    Rule(EditKind.OWN_ATTRIBUTE, ast.Attribute, names.another_attribute),
    Rule(EditKind.OWN_ATTRIBUTE, ast.Attribute, names.object_of_a_method),
    Rule(EditKind.OVER_WORLD_SIZE, ast.expr, wraps.divided_by_world_size),
    Rule(EditKind.TIMES_WORLD_SIZE, ast.expr, wraps.multiplied_by_world_size),
    Rule(EditKind.SUBSCRIPT_LEFT_OUT, ast.Subscript, indices.subscript_left_out),
    Rule(EditKind.CONSTANT, ast.Constant, constants.another_number),
    Rule(EditKind.CONSTANT, ast.Constant, names.name_for_constant),
    Rule(EditKind.SLICE, ast.Slice, indices.another_slice),
    Rule(EditKind.SLICE, ast.Compare, indices.shifted_too),
    Rule(EditKind.SLICE, ast.Call, indices.shifted_call),
    Rule(EditKind.NAME, ast.Name, names.another_name),
    Rule(EditKind.NAME, ast.Name, names.another_constant_of_the_file),
    Rule(EditKind.FUNCTION_APPLIED, ast.expr, wraps.function_applied),
    Rule(EditKind.CLONED, ast.expr, wraps.cloned),
    Rule(EditKind.INDEX, ast.Subscript, indices.index_off_by_one),
    Rule(EditKind.INDEXED_TOO, ast.expr, indices.indexed_too),
    Rule(EditKind.ATTRIBUTE_LEFT_OUT, ast.Attribute, names.attribute_left_out),
    # What is seldom the repair.
    Rule(EditKind.SIGN, ast.UnaryOp, operators.sign_left_out),
    Rule(EditKind.RANGE, ast.Call, indices.range_off_by_one),
    Rule(EditKind.CONDITION, ast.BoolOp, operators.and_or),
    Rule(EditKind.CONDITION, ast.stmt, blocks.condition_of_block),
    Rule(EditKind.BRANCH, ast.IfExp, operators.one_branch),
    Rule(EditKind.ORDER_OF_CALLS, ast.Call, calls.order_of_calls),
    Rule(EditKind.DETACHED, ast.expr, wraps.detached),
    Rule(EditKind.MOVED_IN, ast.stmt, blocks.moved_in),
    Rule(EditKind.ARGUMENT_LEFT_OUT, ast.Call, calls.argument_left_out),
    Rule(EditKind.ARGUMENTS_SWAPPED, ast.Call, calls.arguments_swapped),
    Rule(EditKind.OPERANDS_SWAPPED, ast.BinOp, operators.operands_swapped),
    Rule(EditKind.KEPT_AS_LIST, ast.Call, calls.kept_as_list),
)
