"""What people call samplers: A1111 labels, k-diffusion and ComfyUI names, diffusers class names."""

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

_NEAREST = {
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
"""What comes nearest to A1111's and ComfyUI's that are not here, of their kind and order."""

_SUFFIXES = tuple(sorted(SIGMA_SCHEDULES, key=len, reverse=True))


def _normal(name: str) -> str:
    """Lower case, "++" spelled "pp", everything that is no letter or digit one underscore."""
    lowered = name.strip().lower().replace("++", "pp")
    return "_".join("".join(c if c.isalnum() else " " for c in lowered).split())


_LABELS = {_normal(sampler.label): sampler.name for sampler in SAMPLERS.values()}


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
    """(canonical name, sigma schedule or ``None``) of any name in use: "DPM++ 2M Karras", "k_euler_a", "DDIMScheduler".

    Raises :class:`UnknownSampler`, which lists the names and the nearest one.
    """
    key = _normal(name)
    for suffix in ("", *_SUFFIXES):
        bare = key.removesuffix(f"_{suffix}") if suffix else key
        found = _look_up(bare)
        if found and (not suffix or bare != key):
            return found, suffix or None
    bare = next((key.removesuffix(f"_{suffix}") for suffix in _SUFFIXES if key.endswith(f"_{suffix}")), key)
    known = [*SAMPLERS, *_ALIASES, *_LABELS]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    nearest = _look_up(near[0]) if near else None
    hint = f" Did you mean {nearest!r}?" if nearest else ""
    if kin := _NEAREST.get(bare.removeprefix("k_")):
        hint = f" The nearest here is {kin!r}."
    raise UnknownSampler(
        f"sampler is {name!r}, which is not known.{hint} Known are {', '.join(SAMPLERS)}, "
        f"each with a sigma schedule after it if wanted ({', '.join(SIGMA_SCHEDULES)})."
    )
