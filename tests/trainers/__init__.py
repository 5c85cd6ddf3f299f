"""Training scripts by authors who did not know this package."""
