"""Runs: configuration, plan, runner, store, summary, provenance, loggers."""
