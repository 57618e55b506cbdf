"""Prompts and their encodings, as pages and as embeddings."""
