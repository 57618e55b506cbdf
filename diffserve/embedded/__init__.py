"""The model that ships inside: its picture world, its exact checker, its training recipe and its weights.

world, backgrounds, sprites, render     what a scene is, and painting it exactly
captions, tokenizer                     wording it
sprite_matching, picture_reading        reading a picture back, with no trained network
checker, marks, range_marks, part_marks holding it against what was asked; the marks of the shipped weights
vae_training, latents, tuning_scenes, layouts, denoiser_training, preview_training, student_training
                                        the networks, stage by stage; ``training`` and ``muon`` are what they share
canonical, wish_*, wishes               loose wishes and the captions that are meant
rewriter_model, rewriter_training       the small language model that learns from them
samples, export, card, train            sample sheets, the diffusers directory, the model card, the command line
"""
