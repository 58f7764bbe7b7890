"""`python -m mfs_decompose` is `mfs`."""

from __future__ import annotations

import sys

from mfs_decompose.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
