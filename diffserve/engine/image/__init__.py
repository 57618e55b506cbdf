"""Pictures by continuous batching at every denoising step. Policy in ``scheduler``, ``policy``, ``queues``,
``admission`` and ``buckets``, which need no torch; tensors in the rest.
"""
