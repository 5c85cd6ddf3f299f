"""``python -m ddp_equivalence`` is ``ddp-equivalence``."""

from __future__ import annotations

from ddp_equivalence.commands.main import main

raise SystemExit(main())
