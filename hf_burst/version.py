"""The version of the package that runs: installed metadata stay behind an editable checkout."""

__version__ = "0.2.0"
