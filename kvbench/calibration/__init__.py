"""Calibration: what a method measures of a model once, over a text, before it compresses any prompt.

A stage declares a ``Recipe`` (methods.base); ``text`` finds the text, ``session`` computes what is missing by the
stage's own ``calibrate`` and binds the result to it, ``files`` keeps it.
"""
