"""The picture world of the embedded model: what its scenes are, how they are worded and drawn, and what tells whether a
picture shows one. Floors above paint in it, measure by it and train on it.

    scenes, captions, canonical                what there is, and how it is said
    prompt_reading                             from a prompt to what it asks for; all that can be asked
    render, sprites, backgrounds               scenes drawn
    checker, picture_reading, sprite_matching  pictures read
"""
