"""The model classes that are served: what `recipes/coverage.py` found exact, by its last run."""

SERVED: frozenset[str] = frozenset()
