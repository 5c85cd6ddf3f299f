"""``ddp-equivalence matrix``: record under several versions, and compare neighbours."""
