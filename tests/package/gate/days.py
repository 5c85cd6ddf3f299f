"""The day on which these tests judge."""

import datetime

TODAY = datetime.date(2026, 11, 26)
