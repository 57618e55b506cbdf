"""Evaluation of the shipped models; each module fills one JSON document of ``results/``.

captions  held-out captions, generated and read by the exact checker
ranges    the same over guidance scales and canvases, and the effect of negative prompts
adapters  gifts and old photographs with the shipped adapters
parts     the autoencoder, the preview decoder, the checker, and the time per image
rewriter  images of held-out wishes with and without rewriting
"""
