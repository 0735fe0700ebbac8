"""``python -m ghostclip``: the command line."""

import sys

from ghostclip.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
