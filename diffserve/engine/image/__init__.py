"""Image generation with continuous batching at every denoising step.

``scheduler``, ``policy``, ``queues``, ``admission`` and ``buckets`` hold the policy and need no torch.
"""
