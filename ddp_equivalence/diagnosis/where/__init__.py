"""Says where a difference without a known cause is: which part of the step, with lines."""
