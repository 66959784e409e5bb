"""What is held of a prompt: segments, packed values, operations on them, and what a method sees of a layer."""
