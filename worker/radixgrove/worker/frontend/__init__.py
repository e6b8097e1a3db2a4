"""The HTTP frontend of a worker: OpenAI's API on one side, the engine's messages on the other."""
