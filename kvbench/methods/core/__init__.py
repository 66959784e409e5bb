"""The machinery behind methods: stages, chains, the registry, calibration and isolation."""
