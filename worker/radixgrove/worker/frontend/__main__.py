"""`python -m radixgrove.worker.frontend RUNTIME_DIR INDEX`: one HTTP process of a worker."""

from __future__ import annotations

import sys
from pathlib import Path

from radixgrove.worker.frontend.server import run

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m radixgrove.worker.frontend RUNTIME_DIR INDEX")
    run(Path(sys.argv[1]), int(sys.argv[2]))
