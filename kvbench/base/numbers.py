"""Arithmetic that several rooms share."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up to a whole number. ``b`` is above 0."""
    # -a // b rounds towards minus infinity; unlike math.ceil(a / b) this is exact for numbers of any size
    return -(-a // b)
