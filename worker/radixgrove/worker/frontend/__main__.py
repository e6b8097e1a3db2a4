"""`python -m radixgrove.worker.frontend RUNTIME_DIR INDEX`: one HTTP process of a worker."""

from __future__ import annotations

import sys
from pathlib import Path

from radixgrove.worker.frontend.server import run


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python -m radixgrove.worker.frontend RUNTIME_DIR INDEX")
    directory, index = arguments
    run(Path(directory), int(index))


if __name__ == "__main__":
    main(sys.argv[1:])
