"""Decides which tokens of which requests the next step computes. Knows nothing of tensors."""
