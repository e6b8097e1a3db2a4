"""The harness on the command line: `python -m tests.cluster.harness --help`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys

from tests.cluster.harness import build, demo, images, prepare, previous, release, state
from tests.cluster.harness.cluster import Cluster


def main() -> int:
    arguments = _parser().parse_args()
    try:
        _run(arguments)
    except (build.BuildError, images.ImageError, prepare.PrepareError, state.StateError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.harness")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build the programs of Kubernetes into the cache")
    builder.add_argument("--jobs", type=int, help="how many packages to compile at a time")
    commands.add_parser(
        "prepare", help="install the Debian packages that nodes need (as root); compile bytecode"
    )
    commands.add_parser("images", help="build the images that tests install into the cache")
    up = commands.add_parser("up", help="start a cluster that goes on until `down`")
    up.add_argument("--nodes", type=int, default=2)
    commands.add_parser("down", help="end all clusters that have no living owner")
    commands.add_parser("demo", help="install the chart, serve the demo model, ask it, stay up")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "build":
            print(build.ensure(jobs=arguments.jobs))
        case "prepare":
            prepare.install()
            prepare.compile_bytecode()
        case "images":
            prepare.check()
            for recipe in (*release.recipes(), previous.recipe()):
                print(images.build_image(recipe))
        case "up":
            cluster = Cluster(nodes=arguments.nodes)
            cluster.start()
            cluster.detach()
            print(f"export KUBECONFIG={cluster.kubeconfig}")
        case "down":
            state.remove_ownerless()
        case "demo":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with contextlib.suppress(KeyboardInterrupt):
                demo.run()


if __name__ == "__main__":
    sys.exit(main())
