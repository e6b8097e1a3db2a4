"""One engine, its scheduler, its kernels, without HTTP."""
