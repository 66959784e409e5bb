"""From words to work: requests, configurations, cells, the plan of a run and its forecast."""
