"""Checks a step: judges it, again where one judgement does not show it as it is, and raises."""
