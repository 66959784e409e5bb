"""Suites: named sets of frozen prompts and budgets, with scores, a card, and a check of published results."""
