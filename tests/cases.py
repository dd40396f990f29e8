"""How many random cases a test tries. `make test-fast` tries a part of them."""

import os

SHARE = float(os.environ.get("GPU_LOGICMIX_EXAMPLES", 1))


def examples(number: int) -> int:
    return max(5, round(number * SHARE))
