"""`python -m longtrain`."""

import sys

from longtrain.cli import main

sys.exit(main())
