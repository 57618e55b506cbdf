"""Upscaler networks: their architectures, loading from safetensors, and tiled execution."""
