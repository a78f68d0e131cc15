"""Answers of a model whose prompts lie over ranks: generation, remembered documents, scores."""
