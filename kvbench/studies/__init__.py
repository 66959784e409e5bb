"""Tables over many runs of kvbench's own: cache formats, and results of other tools."""
