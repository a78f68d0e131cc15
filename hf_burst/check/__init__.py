"""Checking that a model is exact over several ranks: it is made tiny and two ranks are compared with one process."""
