"""The parts of a patched model: one capability each, with one life cycle, see [`Part`]."""
