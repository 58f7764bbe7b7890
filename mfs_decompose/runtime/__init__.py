"""The runtime: one resident base, every variant, in one batch, exact."""
