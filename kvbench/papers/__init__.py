"""The five papers: what they publish, what is measured beside it, and what they claim."""

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""A folder for each paper: its tables and claims as YAML, its published values as CSV."""
