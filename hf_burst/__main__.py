"""`python -m hf_burst` is `hf-burst`."""

import sys

from .cli import main

sys.exit(main())
