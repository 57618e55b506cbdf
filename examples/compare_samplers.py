"""Compare samplers and step counts on the same prompts and seeds: ``python examples/compare_samplers.py``."""

from diffserve.experiments import sweep

report = sweep(
    "embedded", folder="report", samplers=["ddim", "dpmpp_2m"], steps=[4, 8], prompts=4, seeds=1, reference_steps=50
)
table = report.to_frame()
print(table[["sampler", "steps", "exact", "psnr_db", "seconds_alone"]].to_string(index=False))
print(f"The report with charts and images is {report.page}.")
