"""`python -m radixgrove.operator --config FILE`."""

from radixgrove.operator.main import main

main()
