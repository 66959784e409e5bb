"""Datasets, their prompts, and the places to fetch them from."""
