"""The UNet, told of texts by keys and values in pages."""
