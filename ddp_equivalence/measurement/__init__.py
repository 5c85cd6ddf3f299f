"""Runs a case on ranks, collects their gradients, and watches a second run if they differ."""
