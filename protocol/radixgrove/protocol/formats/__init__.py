"""How models write reasoning and tool calls, as data."""
