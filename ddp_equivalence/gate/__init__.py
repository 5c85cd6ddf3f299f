"""Records a run under one set of versions, and holds another one against it."""
