"""Checks that a model is exact over several ranks, by comparing two ranks with one process on a tiny copy."""
