"""Where this checkout is: its documents, chart, examples and benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
