"""Pictures over HTTP."""
