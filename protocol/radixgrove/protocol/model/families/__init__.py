"""One file a family of decoders: what its `config.json` says and implies, as a `ModelConfig`."""
