"""Transformers' batches: their documents, and how they are sharded over the ranks."""
