"""Prompts and what the text encoders make of them, as pages and as embeddings."""
