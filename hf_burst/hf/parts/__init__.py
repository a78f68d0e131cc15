"""The parts of a patched model, see [`Part`]."""
