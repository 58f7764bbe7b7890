"""Sums over rows of `W* + delta`, by device."""
