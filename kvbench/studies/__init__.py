"""Tables over many runs of kvbench's own: leaderboard, ranking, equal bytes, and results of other tools."""
