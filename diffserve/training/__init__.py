"""Training and evaluation of the models that ship in ``diffserve/embedded``. No other package imports it.

vae_training, latents, tuning_scenes, layouts, denoiser_training, preview_training, distillation, trajectories
                                   the networks, stage by stage; they share ``training_loop`` and ``muon``
tokenizer                          of captions
wishes                             loosely worded prompts with reference captions
rewriter_model, rewriter_training  the small language model that is trained on them
samples, export, card, train       sample sheets, the diffusers directory, the model card, the command line
eval                               quality measures of the shipped weights
"""
