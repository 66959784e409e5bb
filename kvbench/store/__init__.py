"""Results on disk: samples and metrics of cells, and their records."""
