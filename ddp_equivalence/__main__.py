"""``python -m ddp_equivalence`` is ``ddp-equivalence``."""

from __future__ import annotations

from ddp_equivalence.cli import main

raise SystemExit(main())
