"""Structured pruning: attention heads and inner channels of feed-forwards are removed from a UNet.

The result is a smaller dense network of the same code. In every layer those of least magnitude go: the product of the
norms of a part's input and output weights. (Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017, section
3.1; Michel et al., "Are Sixteen Heads Really Better than One?", NeurIPS 2019.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from torch import Tensor, nn

from diffserve.api.bounds import Between, check_bounds
from diffserve.api.errors import ConfigError

PRUNED_FILE: Final = "pruned.json"
"""Stored next to a UNet's config.json, in which diffusers has no widths of single layers; contains ``Widths``."""

FORMAT: Final = 1
GROUP: Final = 8
"""Channels are removed in groups of this size, because matrix kernels prefer such multiples."""

BOUNDS: Final[Mapping[str, Between]] = {"heads": Between(0.0, 0.9), "channels": Between(0.0, 0.9)}
UNUSUAL: Final = ("norm_q", "norm_k", "added_kv_proj_dim", "fused_projections")
"""Attributes of diffusers' ``Attention`` beyond the Stable Diffusion families that span heads."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the heads and inner channels to remove from every layer, 0 to 0.9, rounded down.

    Raises:
        ConfigError: A share is out of bounds.
    """

    heads: float
    channels: float

    def __post_init__(self) -> None:
        check_bounds(self, BOUNDS)


class Widths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths inside a UNet: attention layer -> heads, feed-forward -> inner channels, by module names."""

    format: int
    heads: dict[str, Count]
    channels: dict[str, Count]


def widths_of(network: nn.Module) -> Widths:
    """Return the current widths of ``network``."""
    heads = {name: int(attn.heads) for name, attn in _attentions(network)}
    channels = {name: int(forward.net[2].in_features) for name, forward in _feed_forwards(network)}
    return Widths(format=FORMAT, heads=heads, channels=channels)


def shrink_to_stored_widths(network: nn.Module, directory: Path) -> tuple[Path, ...]:
    """Make the empty ``network`` as narrow as ``pruned.json`` in ``directory`` says.

    Returns:
        The files that were read; none if the network is not pruned.

    Raises:
        ConfigError: The file is damaged or belongs to another network.
    """
    file = directory / PRUNED_FILE
    if not file.exists():
        return ()
    way_out = "prune the model anew (diffserve prune), or put back the file that was written with its weights"
    try:
        stored_format = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]).get("format")
        if stored_format != FORMAT:
            raise ConfigError(f"its format is {stored_format!r}; this diffserve reads {FORMAT}.")
        shrink(network, msgspec.json.decode(file.read_bytes(), type=Widths))
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{file} cannot be used: {str(error).rstrip('.')}; {way_out}.", param="model") from None
    return (file,)


def shrink(network: nn.Module, widths: Widths) -> None:
    """Make the empty ``network`` as narrow as ``widths``. Raises ConfigError if they do not fit it."""
    now = widths_of(network)
    for kind, target, current in (("heads", widths.heads, now.heads), ("channels", widths.channels, now.channels)):
        unmatched = sorted(target.keys() ^ current.keys())
        if unmatched:
            raise ConfigError(f"its {kind} are for other layers than this UNet has, for example {unmatched[0]!r}.")
        wide = next((name for name, count in target.items() if count > current[name]), None)
        if wide is not None:
            raise ConfigError(f"{wide!r} is to keep {target[wide]} {kind}, and the configuration has {current[wide]}.")
    for name, attn in _attentions(network):
        if widths.heads[name] < attn.heads:
            _keep_heads(attn, torch.arange(widths.heads[name]))
    for name, forward in _feed_forwards(network):
        if widths.channels[name] < now.channels[name]:
            _keep_channels(forward, torch.arange(widths.channels[name]))


def prune(network: nn.Module, shares: Shares) -> None:
    """Remove the least important heads and channels of every layer of ``network``, which holds plain weights.

    Raises:
        ConfigError: The attention of the UNet cannot be cut by heads.
    """
    for name, attn in _attentions(network):
        unusual = [what for what in UNUSUAL if getattr(attn, what, None)]
        if unusual:
            raise ConfigError(f"{name} has {unusual[0]}, which Stable Diffusion's have not, so no head can be cut out.")
        _keep_heads(attn, _most_important(head_importance(attn), shares.heads, 1))
    for _, forward in _feed_forwards(network):
        _keep_channels(forward, _most_important(channel_importance(forward), shares.channels, GROUP))


def head_importance(attn: Any) -> Tensor:
    """Return float64 (heads,): the norm of a head's values times that of its columns of the output.

    Queries and keys only decide where a head looks.
    """
    values = attn.to_v.weight.double().unflatten(0, (attn.heads, -1))
    output = attn.to_out[0].weight.double().unflatten(1, (attn.heads, -1))
    importance: Tensor = values.norm(dim=(1, 2)) * output.norm(dim=(0, 2))
    return importance


def channel_importance(forward: Any) -> Tensor:
    """Return float64 (channels,): norms of a channel's value and gate, with biases, times that of its output column."""
    into = torch.cat([forward.net[0].proj.weight, forward.net[0].proj.bias[:, None]], dim=1).double()
    value, gate = into.norm(dim=1).chunk(2)
    importance: Tensor = value * gate * forward.net[2].weight.double().norm(dim=0)
    return importance


def _most_important(importance: Tensor, share: float, group: int) -> Tensor:
    """Return the ascending indices that stay; of equal values the first stay."""
    num_cut = int(share * len(importance)) // group * group
    return importance.argsort(descending=True, stable=True)[: len(importance) - num_cut].sort().values


def _keep_heads(attn: Any, heads: Tensor) -> None:
    head_dim = attn.inner_dim // attn.heads
    places = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
    for projection in (attn.to_q, attn.to_k, attn.to_v):
        _select(projection, places, 0)
    _select(attn.to_out[0], places, 1)
    attn.heads = attn.sliceable_head_dim = len(heads)
    attn.inner_dim = attn.inner_kv_dim = len(places)


def _keep_channels(forward: Any, channels: Tensor) -> None:
    num_channels = forward.net[2].in_features
    _select(forward.net[0].proj, torch.cat([channels, channels + num_channels]), 0)
    _select(forward.net[2], channels, 1)


def _select(linear: nn.Linear, places: Tensor, dim: int) -> None:
    """Keep the rows (``dim`` 0) or columns (1) at ``places``."""
    places = places.to(linear.weight.device)
    linear.weight = nn.Parameter(linear.weight.detach().index_select(dim, places), requires_grad=False)
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().index_select(0, places), requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape


def _attentions(network: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in network.named_modules() if type(part).__name__ == "Attention")


def _feed_forwards(network: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in network.named_modules():
        if type(part).__name__ == "FeedForward" and type(part.net[0]).__name__ == "GEGLU":
            yield name, part
