"""Inspection of model and adapter files before any tensor is read, without torch."""
