"""The model that ships inside: its picture world, its exact checker, its training recipe and its weights.

    world, backgrounds, sprites, render   what a scene is, and painting it exactly
    captions, tokenizer                   wording it
    checker                               reading a picture back, with no trained network
    vae_training, denoiser_training       the two nets; ``training`` and ``muon`` are what they share
    samples, export, train, marks         sample sheets, the diffusers directory, the recipe's command line, the marks
"""
