"""Steps that leave a difference, and the names that they must have, or must not have."""
