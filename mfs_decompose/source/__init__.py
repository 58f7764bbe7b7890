"""Checkpoints as they lie in a folder: opened from headers alone, aligned with each other, read in bounded blocks.

Nothing here imports torch before the first weight is read.
"""
