"""`python -m radixgrove.operator.fetch …`, as the download Jobs run it."""

import sys

from radixgrove.operator.fetch.download import main

sys.exit(main())
