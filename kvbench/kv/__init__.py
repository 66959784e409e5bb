"""The kept part of a prompt: segments, packed values, operations on them, and the layer as a method sees it."""
