"""The VAE: encoding and decoding of images, previews, and compiled decoders."""
