"""Configuration without torch: its schema, and the combination of files, environment and command line."""
