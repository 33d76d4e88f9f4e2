"""`python -m qkflow` is `qkflow`."""

import sys

from qkflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
