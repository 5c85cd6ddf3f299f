"""Take the definitions that a script needs out of their modules, transitively, by name."""
