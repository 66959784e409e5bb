"""The verbs of suites, which the command line loads by name."""
