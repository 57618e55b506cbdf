"""Image files: reading, writing, parameters in their metadata, provenance, and the protocol of the safety filter."""
