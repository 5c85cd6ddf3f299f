"""Small edits of a user's source, of which some may repair a step that differs."""
