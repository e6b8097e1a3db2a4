"""What measures; each module runs as `python -m benchmarks.FOLDER.MODULE` in a checkout."""
