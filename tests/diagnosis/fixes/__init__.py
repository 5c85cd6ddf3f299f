"""Programs with a mistake, each with the fix that its report prints, applied word for word."""
