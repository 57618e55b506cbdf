"""The synthetic scenes of the embedded model: their definition, captions, rendering and exact recognition.

scenes, captions, canonical                scene types and their wordings
prompt_reading                             parser from prompts to scene descriptions
render, sprites, backgrounds               rendering
checker, picture_reading, sprite_matching  recognition of rendered or generated images
"""
