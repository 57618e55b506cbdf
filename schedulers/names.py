"""Sampler name resolution: A1111 labels, k-diffusion and ComfyUI names, and diffusers class names."""

from __future__ import annotations

import difflib

from schedulers.errors import UnknownSampler
from schedulers.grids import SIGMA_SCHEDULES
from schedulers.samplers import SAMPLERS

_ALIASES = {
    "ancestral": "euler_a",
    "ddpm_fixed_large": "ddpm_large",
    "ddpm_fixed_small": "ddpm",
    "deis_multistep": "deis",
    "dpm_multistep": "dpmpp_2m",
    "dpm_solver_multistep": "dpmpp_2m",
    "dpmsolver_multistep": "dpmpp_2m",
    "dpmsolvermultistep": "dpmpp_2m",
    "deismultistep": "deis",
    "euler_ancestral": "euler_a",
    "euler_ancestral_discrete": "euler_a",
    "eulerancestraldiscrete": "euler_a",
    "euler_discrete": "euler",
    "eulerdiscrete": "euler",
    "heun_discrete": "heun",
    "heundiscrete": "heun",
    "lms_discrete": "lms",
    "lmsdiscrete": "lms",
    "pndm": "plms",
    "predictor_corrector": "pc",
    "scoresdeve": "pc",
    "uni_pc": "unipc",
    "uni_pc_bh2": "unipc",
    "unipc_bh2": "unipc",
    "unipcmultistep": "unipc",
}
"""Canonical sampler name by normalized alias."""

_CLOSEST_SUPPORTED = {
    "ddim_cfgpp": "ddim",
    "dpm2": "heun",
    "dpm2_a": "euler_a",
    "dpm_adaptive": "dpmpp_2m",
    "dpm_fast": "dpmpp_2m",
    "dpmpp_2m_sde_heun": "dpmpp_2m_sde",
    "dpmpp_2s_a": "dpmpp_2m_sde",
    "dpmpp_sde": "dpmpp_2m_sde",
    "ipndm": "deis",
    "restart": "heun",
}
"""Supported sampler of a similar kind and order, by the name of an A1111 or ComfyUI sampler that is not supported."""

_SUFFIXES = tuple(sorted(SIGMA_SCHEDULES, key=len, reverse=True))


def _normalize(name: str) -> str:
    """Return the name in lower case, with "pp" for "++" and one underscore for other non-alphanumeric characters."""
    lowered = name.strip().lower().replace("++", "pp")
    return "_".join("".join(c if c.isalnum() else " " for c in lowered).split())


_LABELS = {_normalize(sampler.label): sampler.name for sampler in SAMPLERS.values()}


def _look_up(key: str) -> str | None:
    for prefix in ("", "k_", "sample_"):
        for suffix in ("", "_gpu", "scheduler", "_scheduler"):
            if key.startswith(prefix) and key.endswith(suffix):
                bare = key[len(prefix) : len(key) - len(suffix)]
                if bare in SAMPLERS:
                    return bare
                if bare in _ALIASES:
                    return _ALIASES[bare]
    return _LABELS.get(key)


def resolve_sampler(name: str) -> tuple[str, str | None]:
    """Resolve a sampler name in any common spelling: "DPM++ 2M Karras", "k_euler_a", "DDIMScheduler".

    Returns:
        The canonical name, and the sigma schedule in the name or ``None``.

    Raises:
        UnknownSampler: If the name is unknown; the message lists the known names and the closest one.
    """
    key = _normalize(name)
    for suffix in ("", *_SUFFIXES):
        bare = key.removesuffix(f"_{suffix}") if suffix else key
        sampler = _look_up(bare)
        if sampler and (not suffix or bare != key):
            return sampler, suffix or None
    bare = next((key.removesuffix(f"_{suffix}") for suffix in _SUFFIXES if key.endswith(f"_{suffix}")), key)
    known_names = [*SAMPLERS, *_ALIASES, *_LABELS]
    matches = difflib.get_close_matches(key, known_names, n=1, cutoff=0.5)
    suggestion = _look_up(matches[0]) if matches else None
    hint = f" Did you mean {suggestion!r}?" if suggestion else ""
    if substitute := _CLOSEST_SUPPORTED.get(bare.removeprefix("k_")):
        hint = f" The nearest here is {substitute!r}."
    raise UnknownSampler(
        f"sampler is {name!r}, which is not known.{hint} Known are {', '.join(SAMPLERS)}, "
        f"each optionally followed by a sigma schedule ({', '.join(SIGMA_SCHEDULES)})."
    )
