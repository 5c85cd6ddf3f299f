"""Steps as users write them, each with one of the causes that are named by their calls."""
