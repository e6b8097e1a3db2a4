"""`python -m radixgrove.cli`: the same command, whatever is on PATH."""

from radixgrove.cli.main import main

main()
