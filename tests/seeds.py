"""Seeds of all tests."""

import os

# Every test draws from seeds that follow from its name and this number; `make test-soak` takes another each time.
SEED = int(os.environ.get("EXITWISE_TEST_SEED", "0"))
