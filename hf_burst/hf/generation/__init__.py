"""Answers for prompts that are sharded over ranks: generation, remembered documents, scores."""
