"""Shared types: requests, results, errors, messages between processes, and the checks of their values. No torch."""
