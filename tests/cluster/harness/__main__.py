"""`python -m tests.cluster.harness build`: the harness on the command line."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.harness import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.harness")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build the programs of Kubernetes into the cache")
    builder.add_argument("--jobs", type=int, help="how many packages to compile at a time")
    arguments = parser.parse_args()
    try:
        print(build.ensure(jobs=arguments.jobs))
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
