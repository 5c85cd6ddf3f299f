"""Tests of ``commands/doctor``."""
