"""GPU kernels, each beside its plain-torch reference; `ops` chooses between them by device."""
