"""Reading prompts and answering them: prefill, decode batches, likelihood, memory, calibration."""
