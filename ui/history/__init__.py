"""The History tab: what was painted for whoever looks, kept by the server."""
