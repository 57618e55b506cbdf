"""Suggestions for options that a command does not have."""

from __future__ import annotations

from typing import Any, Final

SIZE: Final = "--size WIDTHxHEIGHT, such as --size 512x512"
OTHER_NAMES: Final = {
    **dict.fromkeys(("--cfg", "--cfg-scale", "--guidance-scale", "--scale", "--cfg_scale"), "--guidance"),
    **dict.fromkeys(("--width", "--height", "-W", "-H", "--resolution", "--w", "--h"), SIZE),
    **dict.fromkeys(("--negative-prompt", "--neg", "--negative_prompt", "--uc"), "--negative"),
    **dict.fromkeys(("--num-inference-steps", "--num-steps", "--ddim-steps", "--sample-steps"), "--steps"),
    **dict.fromkeys(("--scheduler", "--sampling-method", "--sampler-name"), "--sampler"),
    **dict.fromkeys(("--num-images", "--count", "--n", "--num", "--batch-size", "--n-samples"), "-n"),
    **dict.fromkeys(("--out", "--outfile", "--outdir", "--output-dir", "--save"), "--output"),
    **dict.fromkeys(("--ckpt", "--checkpoint", "--model-path", "--model-id"), "--model"),
    **dict.fromkeys(("--init-image", "--init-img", "--image", "--input"), "--init"),
    **dict.fromkeys(("--denoising-strength", "--denoise"), "--strength"),
    **dict.fromkeys(("--lora-path", "--loras"), "--lora"),
    **dict.fromkeys(("--url", "--api", "--endpoint"), "--server"),
    **dict.fromkeys(("--listen", "--bind"), "--host"),
    **dict.fromkeys(("--precision", "--fp16", "--half"), "--dtype"),
}
"""Maps options of other programs to the equivalent option of this one."""


def suggestion_for(error: Any) -> str | None:
    """Return an error message that suggests the equivalent of an unknown option, or None.

    Args:
        error: A usage error of click.
    """
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    right = OTHER_NAMES.get(option) if isinstance(option, str) else None
    if right is None or context is None:
        return None
    options = {name for parameter in context.command.params for name in parameter.opts}
    if right.split()[0] not in options:
        return None
    return f"No such option: {option}; give {right}."
