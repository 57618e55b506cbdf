"""Paint three pictures with different settings in one batch: ``python examples/paint.py``."""

from diffserve import DiffusionParams, Engine, GenerationRequest

engine = Engine.from_pretrained("embedded")
results = engine.generate(
    [
        GenerationRequest(prompt="a penguin", seed=1, diffusion=DiffusionParams(sampler="ddim", num_steps=10)),
        GenerationRequest(
            prompt="a castle at night", seed=2, diffusion=DiffusionParams(sampler="Euler a", num_steps=20)
        ),
        GenerationRequest(prompt="two apples", seed=3, diffusion=DiffusionParams(guidance_interval=(0.0, 0.6))),
    ]
)
for result in results:
    result.image.save(f"{result.prompt.replace(' ', '-')}.png")
    print(f"{result.prompt}: seed {result.seed}, {result.num_steps} steps of {result.sampler}")
