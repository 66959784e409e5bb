"""The verbs of papers, which the command line loads by name."""
