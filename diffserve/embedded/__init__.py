"""The model that ships inside: its training recipe, its evaluation and its weights.

vae_training, latents, tuning_scenes, layouts, denoiser_training, preview_training, distillation, trajectories
                                   the networks, stage by stage; ``training`` and ``muon`` are what they share
tokenizer                          of captions
wishes                             loose wishes and the captions that are meant
rewriter_model, rewriter_training  the small language model that learns from them
samples, export, card, train       sample sheets, the diffusers directory, the model card, the command line
eval                               what the shipped weights can do
"""
