"""A small change of a user's source file, which may repair a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EditKind(StrEnum):
    """What an edit changes. The values are phrases for a reader."""

    NAME = "another name"
    OWN_ATTRIBUTE = "another attribute of self"
    ATTRIBUTE_LEFT_OUT = "attribute left out"
    METHOD = "another function"
    TENSORS_OF_MODULE = "other tensors of a module"
    DIVISOR = "another divisor"
    IN_PLACE = "in place or not in place"
    CALL_LEFT_OUT = "call left out"
    CALL_BY_NAME = "name in place of a call"
    FUNCTION_APPLIED = "function applied"
    KEYWORD_ADDED = "keyword added"
    OPTION_GIVEN = "option given"
    DOT_ADDED = "dot behind a prefix"
    MASKED_TOO = "another mask too"
    KEYWORD_LEFT_OUT = "keyword left out"
    ARGUMENT_LEFT_OUT = "argument left out"
    ARGUMENTS_SWAPPED = "arguments swapped"
    OPERATOR = "operator"
    OPERAND_LEFT_OUT = "operand left out"
    OPERANDS_SWAPPED = "operands swapped"
    PARENTHESES = "parentheses"
    ROUNDED_UP = "rounded up"
    COMPARISON = "comparison"
    CONDITION = "condition"
    CONDITION_LEFT_OUT = "condition left out"
    SIGN = "sign"
    CONSTANT = "constant"
    STRING = "another string"
    SLICE = "slice"
    INDEX = "index"
    SUBSCRIPT_LEFT_OUT = "subscript left out"
    PERMUTATION_INVERTED = "permutation inverted"
    OFFSET = "offset of the rank"
    RANGE = "number of repetitions"
    LISTS_JOINED = "another list too"
    TIMES_WORLD_SIZE = "multiplied by the world size"
    OVER_WORLD_SIZE = "divided by the world size"
    TIMES_ARGUMENT = "multiplied by an argument"
    DETACHED = "detached"
    CLONED = "cloned"
    REQUIRES_GRAD = "gradient required"
    ADDED_UP = "added up or assigned"
    RESULT_USED = "result of a call used"
    REDUCED = "all-reduce added"
    WITH_GRADIENT = "collective with gradient"
    JUMP = "return, break or continue"
    STATEMENT_LEFT_OUT = "statement left out"
    STATEMENTS_SWAPPED = "statement moved behind the next one"
    MOVED_OUT = "statement moved behind the block"
    FLAG = "option switched"
    ORDER_OF_PARTS = "parts in another order"
    AXES = "axes swapped"
    MIRRORED = "slice at the other end"
    BOTH_BOUNDS = "other bound added"
    COUNT_OF_ALL = "number over all ranks"
    MEAN_OF_ALL = "mean over all ranks"
    AFTER_REDUCTION = "after the reduction"
    VARIANCE_OF_ALL = "variance over all ranks"
    ONLY_THESE = "backward into some parameters only"
    HOOKS = "hooks replaced"
    BEFORE_SKIPPED = "done before skipping"
    ONLY_IF = "counted under a condition"
    SHARE_OF_A_TURN = "divided by the number of turns"
    CONTEXT_LEFT_OUT = "context manager left out"


@dataclass(frozen=True)
class Edit:
    """One small change of a user's source file.

    file: the path as in code objects
    line: where the expression or statement that is changed begins, from 1
    start, end: the bytes of the file, in utf-8, that are replaced
    text: what stands there afterwards
    """

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: EditKind
