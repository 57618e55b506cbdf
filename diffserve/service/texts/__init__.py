"""Texts, conversations and rewritten prompts over HTTP."""
