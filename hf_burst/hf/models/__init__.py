"""Supported models, and how to find their functions."""
