"""Batches as Transformers makes them: documents, and how they are cut over the ranks."""
