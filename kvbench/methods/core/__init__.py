"""The machinery that methods stand on: stages, chains, the registry, calibration and isolation."""
