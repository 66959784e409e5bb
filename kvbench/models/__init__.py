"""The boundary to transformers: loading, registered attention, low-rank projections, the tiny model."""
