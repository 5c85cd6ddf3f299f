"""Attacks on the conditions of the claims, by what they simulate."""
