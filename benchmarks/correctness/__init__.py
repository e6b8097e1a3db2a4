"""Texts and distances against other implementations, on a GPU."""
