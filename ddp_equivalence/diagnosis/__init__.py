"""Explain a difference: hypotheses with predictions, held against what was measured and seen."""
