"""The synthetic scenes of the embedded model: their definition, captions, rendering and exact recognition.

scenes, captions, prompt_reading           scene types, their wordings, and the parser of prompts
render                                     sprites, backgrounds and whole scenes
checker, picture_reading, sprite_matching  recognition of rendered or generated images
"""
