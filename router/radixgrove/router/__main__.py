"""`python -m radixgrove.router DIRECTORY INDEX`: one of several processes that share a port.

`python -m radixgrove.router SETTINGS.json`: a whole router from a file of settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from radixgrove.router.main import SETTINGS_FILE, load_settings, run, run_process


def main(arguments: list[str]) -> None:
    match arguments:
        case [settings]:
            sys.exit(run(load_settings(Path(settings))))
        case [directory, index]:
            settings_ = load_settings(Path(directory) / SETTINGS_FILE)
            sys.exit(run_process(settings_, int(index), Path(directory)))
        case _:
            sys.exit("usage: python -m radixgrove.router SETTINGS.json | DIRECTORY INDEX")


if __name__ == "__main__":
    main(sys.argv[1:])
