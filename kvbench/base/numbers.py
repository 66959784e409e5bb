"""Arithmetic that several rooms share."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up to a whole number."""
    return -(-a // b)
