"""What the variants have in common, and what is left of each: base and delta."""

from mfs_decompose.base_extraction.deltas import delta_rows, mean_rows
from mfs_decompose.base_extraction.refined import Refined, refine
from mfs_decompose.base_extraction.unknown import family_ranks

__all__ = ["Refined", "delta_rows", "family_ranks", "mean_rows", "refine"]
