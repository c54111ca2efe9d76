"""``python -m tfps``: the same as the ``tfps`` command."""

import sys

from tfps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
