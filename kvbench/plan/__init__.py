"""From words to work: requests, configurations, cells and the plan of a run."""
