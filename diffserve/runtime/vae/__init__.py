"""From latents to pictures and back: the autoencoder, in tiles at need, and previews."""
