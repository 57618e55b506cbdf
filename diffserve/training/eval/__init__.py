"""What the shipped models can do, measured: each module fills one JSON document of ``results/``.

captions  held-out captions painted and read by the exact checker
ranges    the same over guidance scales and canvases, and what a negative prompt keeps away
adapters  gifts and old photographs, by the adapters that ship
parts     the autoencoder, the preview decoder, the checker, and the time that a picture takes
rewriter  held-out wishes painted as they are and rewritten
"""
