"""`python -m hf_burst.cli` is `hf-burst`."""

import sys

from . import main

sys.exit(main())
