"""RULER's thirteen tasks (arXiv:2404.06654), generated from a seed as github.com/NVIDIA/RULER generates them.

A file for each kind of task yields its prompts one after another, fitted to a length in tokens by ``fitting``. All
draws of a task come from one generator in sequence, those of the search for a size too: the same tokenizer, length and
seed give the same prompts on every machine.
"""
