"""``python -m ghostclip.bench``: step times of private training beside ordinary training, on this machine."""

import sys

from ghostclip.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
