"""Training and evaluation of the models that ship in ``diffserve/embedded``. No other package imports it.

vae_training, latents, tuning_scenes, layouts, denoiser_training, preview_training, distillation, trajectories
                                   the networks, stage by stage; ``training_loop`` and ``muon`` are shared by them
tokenizer                          of captions
wishes                             loosely worded prompts and the captions that are meant
rewriter_model, rewriter_training  the small language model that learns from them
samples, export, card, train       sample sheets, the diffusers directory, the model card, the command line
eval                               measures what the shipped weights can do
"""
