"""The UNet, with prompt keys and values read from pages."""
