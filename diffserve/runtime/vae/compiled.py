"""VAE decoders compiled by AOTInductor, one package for each image size, made by ``diffserve warm``.

Compiling takes a minute, so it never happens while a server runs. A package decodes one image at a time with the
weights of the loaded network. Only CUDA devices use packages: a CPU gains too little.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor, nn

from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.runtime.accelerators import least_seconds
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.unet.inductor import WEIGHTS_AT_LOAD, compile_package
from diffserve.runtime.unet.package import Package
from diffserve.runtime.vae.vae import VAERunner

FOLDER: Final = "compiled"
FORMAT: Final = 1
MAX_ERRORS: Final = {torch.float32: 0.005, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest distance of a compiled decode from the network's own, as the norm of the difference over the norm.

It is about twice what rounding does: SDXL's own decoder is 0.029 from float32 in bfloat16 and 0.004 in float16, and in
float32 two memory formats are 0.002 apart (1024x1024 on an H200).
"""

MIN_SAVING: Final = 0.03
"""Share of the network's time that a package must save to be kept."""

logger = logging.getLogger(__name__)


class FlatDecoder(nn.Module):
    """The decoding half of an autoencoder, with a tensor in and a tensor out."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, z: Tensor) -> Tensor:
        """Decode latents (B, C, h, w) to images (B, 3, H, W)."""
        images: Tensor = self.network.decode(z, return_dict=False)[0]
        return images


class DecoderPackages:
    """The packages of one VAE in a cache folder. Calling it decodes if there is a package for the shape.

    A shape is looked up once, so that the way an image is decoded does not change while the process lives.
    """

    def __init__(self, vae: VAERunner, cache: DiskCache) -> None:
        self._vae = vae
        self._folder = None if cache.folder is None else cache.folder / FOLDER
        self._loaded: dict[tuple[int, ...], Package | None] = {}
        self._failed: set[tuple[int, ...]] = set()

    def __call__(self, z: Tensor) -> Tensor | None:
        """Decode ``z`` (B, C, h, w), image by image.

        Returns:
            The images; ``None`` where there is no package for the size, or it failed twice in a row.

        Raises:
            torch.OutOfMemoryError: a package failed for the first time in a row. Its error does not say whether memory
                ran out, so the caller can free some and call again.
        """
        shape = (1, *z.shape[1:])
        if shape not in self._loaded:
            self._loaded[shape] = self._load(shape)
        package = self._loaded[shape]
        if package is None:
            return None
        try:
            images = torch.cat([package([image]) for image in z.split(1)])
        except RuntimeError as error:
            raise_if_sticky(error)
            if shape not in self._failed:
                self._failed.add(shape)
                raise torch.OutOfMemoryError(f"a compiled decoder failed, maybe for lack of memory: {error}") from error
            logger.warning("a compiled decoder failed and is not used again: %s", str(error).partition("\n")[0])
            self._loaded[shape] = None
            return None
        self._failed.discard(shape)
        return images

    def path(self, shape: tuple[int, ...]) -> Path | None:
        """Return where the package for latents of ``shape`` is stored; ``None`` without a cache folder."""
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(f'{self._identity} {shape}'.encode()).hexdigest()}.pt2"

    def make(self, height: int, width: int) -> str:
        """Compile the decoder for latents of (``height``, ``width``) cells, and keep it if it is close and faster.

        Returns:
            What was measured, and whether the package is used, in one line.

        Raises:
            ConfigError: there is no cache folder.
            Exception: what the compiler raises.
        """
        shape = (1, self._vae.latent_channels, height, width)
        path = self.path(shape)
        if path is None:
            raise ConfigError(
                "packages are kept in the cache folder, and engine.cache_dir is empty.", param="cache_dir"
            )
        rng = torch.Generator().manual_seed(0)
        z = torch.randn(shape, generator=rng).to(self._vae.device, self._vae.dtype)
        if path.is_file():
            return self._judge(z, path, path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=path.parent, prefix=".", ignore_cleanup_errors=True) as folder:
            part = Path(folder) / "part.pt2"
            compile_package(FlatDecoder(self._vae.network), [z], part, WEIGHTS_AT_LOAD)
            return self._judge(z, part, path)

    def _judge(self, z: Tensor, compiled_file: Path, path: Path) -> str:
        """Measure the package at ``compiled_file`` by decoding ``z``; keep it at ``path`` or delete it. See ``make``.

        It lies at ``path`` only after it was called: a package that crashes does so here, and not in a server.
        """
        package = self._open(compiled_file)
        if package is None:
            path.unlink(missing_ok=True)
            return "not used: the package that was just compiled cannot be loaded"
        decoder = FlatDecoder(self._vae.network).eval()
        with torch.inference_mode():
            expected, output = decoder(z).float(), package([z]).float()
            error = float((output - expected).norm() / expected.norm())
            network_s = least_seconds(lambda: decoder(z), self._vae.device)
            package_s = least_seconds(lambda: package([z]), self._vae.device)
        is_used = error <= MAX_ERRORS[self._vae.dtype] and package_s <= (1.0 - MIN_SAVING) * network_s
        if is_used:
            os.replace(compiled_file, path)
        else:
            path.unlink(missing_ok=True)
        return (
            f"{'used' if is_used else 'not used'}: {1e3 * package_s:.1f} ms compiled, {1e3 * network_s:.1f} ms by the "
            f"network, error {error:.2g}"
        )

    def _load(self, shape: tuple[int, ...]) -> Package | None:
        path = self.path(shape)
        return None if path is None or not path.is_file() else self._open(path)

    def _open(self, path: Path) -> Package | None:
        try:
            package = Package(path, self._vae.device)
            package.use_weights(self._vae.network)
            os.utime(path)  # the packages that were used last are deleted last
        except Exception as error:  # a damaged file raises whatever the reader of its part raises
            logger.warning("a compiled decoder cannot be loaded: %s", str(error).partition("\n")[0])
            return None
        return package

    @property
    def _identity(self) -> str:
        """All that a package depends on except its shape; weights are those of the network, so only their layout."""
        import diffusers

        network, device = self._vae.network, self._vae.device
        config = json.dumps({key: value for key, value in network.config.items() if key[0] != "_"}, default=str)
        layout = {str(weight.stride()) for weight in network.decoder.parameters() if weight.ndim == 4}
        machine = f"{hardware_name(device)} torch {torch.__version__} cuda {torch.version.cuda}"
        return f"vae {FORMAT} {self._vae.dtype} {config} {sorted(layout)} {machine} diffusers {diffusers.__version__}"
