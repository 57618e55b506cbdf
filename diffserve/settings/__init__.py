"""Configuration: its schema, and how files, environment and command line are combined. No torch."""
