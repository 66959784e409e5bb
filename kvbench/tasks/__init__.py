"""Datasets, their prompts, and where they are fetched from."""
