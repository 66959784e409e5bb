"""The verbs of studies, which the command line loads by name."""
