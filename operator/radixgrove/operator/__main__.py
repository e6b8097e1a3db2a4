"""`python -m radixgrove.operator --config FILE`."""

from radixgrove.operator.controller.main import main

main()
