"""Paint through a server that runs already: ``python examples/ask_a_server.py http://127.0.0.1:8000``."""

import sys

from diffserve.client import Client, CompletedImage, Progress

with Client(sys.argv[1]) as client, client.generate_stream("an owl above a castle", seed=7) as events:
    for event in events:
        match event:
            case Progress(step=step, steps=steps) if step is not None:
                print(f"step {step} of {steps}")
            case CompletedImage():
                event.image.save("owl.png")
                print(f"{event.num_inference_steps} steps of {event.sampler}, seed {event.seed}")
