"""The exit codes of ``ddp-equivalence``. Each has the same meaning for every command."""

from __future__ import annotations

SAME, DIFFERENT, BAD_INPUT, NOT_JUDGED = 0, 1, 2, 3
YELLOW = 4
INTERRUPTED = 130
EXIT_CODE_OF_LEVEL = {"information": SAME, "yellow": YELLOW, "red": DIFFERENT}
EXIT_CODE_OF_OUTCOME = {"same": SAME, "different": DIFFERENT, "unknown": NOT_JUDGED}
