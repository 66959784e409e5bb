"""The runner: it reads a plan's prompts, compresses, decodes, scores and stores; progress, W&B."""
