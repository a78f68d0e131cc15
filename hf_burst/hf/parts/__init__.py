"""The parts of a patched model, see [`Part`]: a new capability is a new part, and a line in the list of `patch.py`."""
