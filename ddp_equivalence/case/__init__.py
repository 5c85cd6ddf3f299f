"""A case names what is trained and how its batch is split; every process rebuilds it alike."""
