"""Read prompts and answer them: prefill, decode batches, likelihood, memory, calibration."""
