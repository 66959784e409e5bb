"""Figures of papers, computed from a model's activations and drawn from the tidy data alone."""
