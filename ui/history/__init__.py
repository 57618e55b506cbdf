"""The History tab: images that the server stores for the visitor's key."""
