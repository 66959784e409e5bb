"""The machinery behind methods: stages, chains, the registry, and calibration."""
