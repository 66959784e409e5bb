"""Bytes by formula, and caches held to what their chains declare: after the prompt and while decoding."""
