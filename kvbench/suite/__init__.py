"""Named, frozen suites: what every row is measured on, its score, its card, and the check of a folder of results."""
