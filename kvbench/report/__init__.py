"""Summaries of stored results, and the tables and pictures that show them."""
