"""Shared types without torch: requests, results, errors, messages between processes, and validation."""
