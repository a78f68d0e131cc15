"""Layers that use less memory on one rank. Nothing here knows about other ranks."""
