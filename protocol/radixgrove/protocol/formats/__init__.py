"""How models write reasoning and calls of tools, as data."""
