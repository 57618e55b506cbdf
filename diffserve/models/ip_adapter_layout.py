"""Layout of IP-Adapter files, recognized from the names and shapes of their tensors, without torch.

(Ye et al. 2023, arXiv 2308.06721.) Read are the base and plus kinds, in the original layout and in that of diffusers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple


class AdapterLayout(NamedTuple):
    """Contents of an IP-Adapter's file, from the shapes of its tensors.

    Attributes:
        kind: "base" projects the image embedding, "plus" resamples hidden states of the image encoder.
        num_tokens: Image tokens that the UNet reads.
        width: Numbers of a token, the ``cross_attention_dim`` of the UNet.
        image_dim: Numbers that the projection reads: ``projection_dim`` of the encoder (base), ``hidden_size`` (plus).
        projection: Tensor names in the file by the names of ``runtime.ip_adapter``; two for a joint ``to_kv``.
        layers: Names of the keys' and values' weights of each cross-attention layer of the UNet, by the layer's place,
            or in diffusers' layout by the path of its module.
        num_parameters: Numbers in the file.
    """

    kind: Literal["base", "plus"]
    num_tokens: int
    width: int
    image_dim: int
    projection: dict[str, str]
    layers: dict[int | str, tuple[str, str]]
    num_parameters: int


class NotAnAdapterError(Exception):
    """Error of a file that is no supported IP-Adapter; the message completes a sentence whose subject is the file."""


ORIGINAL: Final = re.compile(r"ip_adapter\.(\d+)\.to_([kv])_ip\.weight")
DIFFUSERS: Final = re.compile(r"(?:unet\.)?(.+)\.processor\.to_([kv])_ip\.0\.weight")
PROJECTIONS: Final = ("image_proj.", "encoder_hid_proj.image_projection_layers.0.")
OWN_NAMES: Final = (
    (re.compile(r"image_embeds\.(.+)"), r"proj.\1"),
    (re.compile(r"layers\.(\d+)\.ln0\.(.+)"), r"layers.\1.0.norm1.\2"),
    (re.compile(r"layers\.(\d+)\.ln1\.(.+)"), r"layers.\1.0.norm2.\2"),
    (re.compile(r"layers\.(\d+)\.attn\.to_out\.0\.weight"), r"layers.\1.0.to_out.weight"),
    (re.compile(r"layers\.(\d+)\.attn\.(.+)"), r"layers.\1.0.\2"),
    (re.compile(r"layers\.(\d+)\.ff\.0\.(.+)"), r"layers.\1.1.0.\2"),
    (re.compile(r"layers\.(\d+)\.ff\.1\.net\.0\.proj\.weight"), r"layers.\1.1.1.weight"),
    (re.compile(r"layers\.(\d+)\.ff\.1\.net\.2\.weight"), r"layers.\1.1.3.weight"),
)
"""diffusers' names of the projection's tensors, and the original ones that are used here."""


def read_layout(shapes: Mapping[str, Sequence[int]]) -> AdapterLayout:
    """Recognize an IP-Adapter by the shapes of its tensors, in the original layout or that of diffusers.

    Raises:
        NotAnAdapterError: The tensors are not those of a base or plus adapter.
    """
    layers: dict[int | str, dict[str, str]] = {}
    projection: dict[str, str] = {}
    for name in shapes:
        if match := ORIGINAL.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = name
        elif match := DIFFUSERS.fullmatch(name):
            layers.setdefault(match[1], {})[match[2]] = name
        elif prefix := next((prefix for prefix in PROJECTIONS if name.startswith(prefix)), ""):
            projection[_own_name(name.removeprefix(prefix))] = name
    if not layers or not projection:
        raise NotAnAdapterError("is not an IP-Adapter: it has no image_proj or no to_k_ip tensors")
    kinds = [all(isinstance(layer, kind) for layer in layers) for kind in (int, str)]
    if not any(kinds) or any(set(pair) != {"k", "v"} for pair in layers.values()):
        raise NotAnAdapterError("is a damaged IP-Adapter: some of its layers have no to_k_ip or no to_v_ip")
    sizes = {name: tuple(shapes[stored]) for name, stored in projection.items()}
    if any(key.startswith(("perceiver_resampler.", "proj.0.")) for key in sizes):
        raise NotAnAdapterError(
            "is an IP-Adapter of another kind (FaceID or full face); diffserve supports the base and plus kinds"
        )
    kind: Literal["base", "plus"] = "base" if "proj.weight" in sizes else "plus"
    try:
        if kind == "base":
            width = sizes["norm.weight"][0]
            num_tokens, image_dim = sizes["proj.weight"][0] // width, sizes["proj.weight"][1]
        else:
            num_tokens, image_dim, width = sizes["latents"][1], sizes["proj_in.weight"][1], sizes["proj_out.weight"][0]
        _check_sizes(sizes, expected_sizes(kind, sizes, num_tokens, width, image_dim))
    except (KeyError, IndexError) as error:
        raise NotAnAdapterError(f"is a damaged IP-Adapter: image_proj has no usable {error.args[0]}") from None
    places = sorted(layers, key=lambda layer: (str(type(layer)), layer))  # paths stay paths, numbers become places
    pairs: dict[int | str, tuple[str, str]] = {
        (place if isinstance(layer, int) else layer): (layers[layer]["k"], layers[layer]["v"])
        for place, layer in enumerate(places)
    }
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    return AdapterLayout(kind, num_tokens, width, image_dim, projection, pairs, num_parameters)


def _own_name(name: str) -> str:
    for pattern, replacement in OWN_NAMES:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


HEAD_DIM: Final = 64
"""Numbers of an attention head of the resampler, in every published file."""


def expected_sizes(
    kind: str, sizes: Mapping[str, tuple[int, ...]], num_tokens: int, width: int, image_dim: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the projection of an adapter needs, by name. Raises KeyError, IndexError."""
    if kind == "base":
        shapes = {"proj.weight": (num_tokens * width, image_dim), "proj.bias": (num_tokens * width,)}
        return shapes | {f"norm.{part}": (width,) for part in ("weight", "bias")}
    inner = sizes["latents"][2]
    shapes = {"latents": (1, num_tokens, inner), "proj_in.weight": (inner, image_dim), "proj_in.bias": (inner,)}
    shapes |= {"proj_out.weight": (width, inner), "proj_out.bias": (width,)}
    shapes |= {f"norm_out.{part}": (width,) for part in ("weight", "bias")}
    for block in range(num_blocks(sizes)):
        first, second = f"layers.{block}.0.", f"layers.{block}.1."
        heads, wide = sizes[f"{first}to_q.weight"][0], sizes[f"{second}1.weight"][0]
        norms = (f"{first}norm1", f"{first}norm2", f"{second}0")
        shapes |= {f"{norm}.{part}": (inner,) for norm in norms for part in ("weight", "bias")}
        shapes |= {f"{first}to_q.weight": (heads - heads % HEAD_DIM, inner)}
        if f"{first}to_kv.weight" in sizes:
            shapes |= {f"{first}to_kv.weight": (2 * heads, inner)}
        else:
            shapes |= {f"{first}{name}.weight": (heads, inner) for name in ("to_k", "to_v")}
        shapes |= {f"{first}to_out.weight": (inner, heads), f"{second}1.weight": (wide, inner)}
        shapes |= {f"{second}3.weight": (inner, wide)}
    return shapes


def num_blocks(names: Iterable[str]) -> int:
    """Return the number of blocks of a resampler with tensors of these ``names``."""
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})


def _check_sizes(sizes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise NotAnAdapterError if a tensor is missing, unknown, or has another shape than expected."""
    for name in sorted(sizes.keys() | expected.keys()):
        if sizes.get(name) != expected.get(name):
            problem = "has no" if name not in sizes else "has an unknown" if name not in expected else "has a wrong"
            raise NotAnAdapterError(f"is a damaged IP-Adapter: image_proj {problem} {name}")
