"""RULER's thirteen tasks (arXiv:2404.06654), generated from a seed as github.com/NVIDIA/RULER generates them.

Each kind of task has a file that yields its prompts one after another. ``fitting`` fits them to a length in tokens. One
generator makes all draws of a task in sequence, including the draws of the search for a size. So the same tokenizer,
length and seed give the same prompts on every machine.
"""
