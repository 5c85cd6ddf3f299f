"""Tests of ``ranks/user_modules``."""
