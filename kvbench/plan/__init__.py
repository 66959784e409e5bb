"""The plan of a run: requests, configurations, cells, the checked plan and its forecast."""
