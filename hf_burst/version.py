"""The version of the running package: an editable checkout may be newer than its installed metadata."""

__version__ = "0.2.0"
