"""The runner: reads the prompts of a plan, compresses, decodes, scores and stores; progress, W&B."""
