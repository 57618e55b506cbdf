"""Loading of model weights from disk."""
