"""A frontend that hears what every engine has of a prompt, however busy the machine of tests is.

The product's waits a twentieth of a second, and then chooses without.
"""

from __future__ import annotations

import sys

from radixgrove.worker.frontend import members
from radixgrove.worker.frontend.__main__ import main as run


def main(arguments: list[str]) -> None:
    members.PEEK_SECONDS = 60.0
    run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
