"""Image files: reading, writing, metadata parameters, provenance marks, and the safety filter protocol."""
