"""Image generation with continuous batching at every denoising step.

``scheduler``, ``policy``, ``fair_share``, ``admission`` and ``buckets`` hold the policy and need no torch.
"""
