"""Bytes by formula, and checks that caches hold what their chains declare: after the prompt and while decoding."""
