"""Measure how far a checkpoint drifts from the one it stands for: perplexity, KL, top-1 agreement, recovered."""
