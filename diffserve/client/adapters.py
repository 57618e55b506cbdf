"""Methods of the client for adapters and prompt styles, which the server lists on A1111's routes."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from diffserve.client.transport import HttpClient


class LoraFile(msgspec.Struct, frozen=True):
    """LoRA that a request may name.

    Attributes:
        name: The name for requests and prompt tags.
        alias: The path below the LoRA folder, without suffix.
        metadata: Texts that the trainer stored in the file.
    """

    name: str
    alias: str = ""
    metadata: dict[str, Any] = {}

    @property
    def trigger_words(self) -> tuple[str, ...]:
        """Words that the LoRA was trained on, empty if its file does not say."""
        phrase = self.metadata.get("modelspec.trigger_phrase")
        return tuple(phrase.replace(",", " ").split()) if isinstance(phrase, str) else ()


class PromptStyle(msgspec.Struct, frozen=True):
    """Texts that a style adds to the prompts: around ``{prompt}`` if it contains that, else after a comma."""

    name: str
    prompt: str = ""
    negative_prompt: str = ""

    def apply(self, prompt: str, negative_prompt: str) -> tuple[str, str]:
        """Add the texts of this style.

        Args:
            prompt: The prompt.
            negative_prompt: The negative prompt.

        Returns:
            The new prompt and negative prompt.
        """
        return _with_text(self.prompt, prompt), _with_text(self.negative_prompt, negative_prompt)


def _with_text(style: str, prompt: str) -> str:
    if "{prompt}" in style:
        return style.replace("{prompt}", prompt)
    return ", ".join(part for part in (prompt, style) if part.strip())


class _Maps(msgspec.Struct):
    images: tuple[str, ...]


class AdapterMethods(HttpClient):
    """Methods of the client for adapters and prompt styles."""

    async def loras(self) -> tuple[LoraFile, ...]:
        """List the LoRAs of the server.

        Returns:
            The usable LoRAs, sorted by name.
        """
        return await self._call("GET", "/sdapi/v1/loras", tuple[LoraFile, ...])

    async def prompt_styles(self) -> tuple[PromptStyle, ...]:
        """List the prompt styles in the server's ``styles.csv``.

        Returns:
            The styles in the order of the file.
        """
        return await self._call("GET", "/sdapi/v1/prompt-styles", tuple[PromptStyle, ...])

    async def control_map(self, picture: bytes, preprocessor: str) -> bytes:
        """Compute the control map of a picture without generating an image.

        Args:
            picture: The contents of an image file.
            preprocessor: "canny" for edges, or "none" for the picture itself.

        Returns:
            The map as a PNG file.

        Raises:
            InvalidRequest: The picture cannot be decoded, or there is no such preprocessor.
        """
        image = base64.b64encode(picture).decode("ascii")
        body = {"controlnet_module": preprocessor, "controlnet_input_images": [image]}
        answer = await self._call("POST", "/controlnet/detect", _Maps, body)
        return base64.b64decode(answer.images[0])
