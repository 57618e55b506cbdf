"""Watch a picture come about, step by step: ``python examples/previews.py``."""

from PIL import Image

from diffserve import Engine, GenerationRequest, ImageFinished, Preview, Progress

engine = Engine.from_pretrained("embedded")
for event in engine.stream(GenerationRequest(prompt="a fox next to a cactus on the beach", seed=19, preview_every=5)):
    match event:
        case Progress(step_index=step, num_steps=num_steps):
            print(f"step {step} of {num_steps}")
        case Preview(step_index=step, picture=picture):
            Image.fromarray(picture.array).save(f"preview-{step:02d}.png")
        case ImageFinished(result=result):
            result.image.save("fox.png")
