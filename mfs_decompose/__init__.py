"""Decompose a base model and its fine-tunes into one family artifact, and give every checkpoint back."""

from __future__ import annotations

__version__ = "0.1.0"
