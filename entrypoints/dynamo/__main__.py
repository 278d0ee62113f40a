"""`python -m entrypoints.dynamo MODEL …`"""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from dynamo.common.backend.run import run
    except ModuleNotFoundError as error:
        print(f"entrypoints.dynamo: {error}; it needs pip install 'pageloom[dynamo]'", file=sys.stderr)
        return 1

    from entrypoints.dynamo.worker import PageloomEngine

    run(PageloomEngine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
