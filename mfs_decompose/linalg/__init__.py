"""Numerical building blocks: pure functions on tensors, with no files and no configuration.

Shapes as suffixes: B matrices in a batch, M rows (long side), N columns (short side), L sketch width,
R rank, O out features, I in features.
"""
