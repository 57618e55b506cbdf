"""``diffserve mcp``: Model Context Protocol (MCP) tools that generate images with a running server.

The tools call the server through ``diffserve.client`` and return image content, parameters as structured content, and
progress notifications. A cancelled call closes its connection, which cancels the work on the server. Recent images
have names that ``edit_image`` and ``upscale_image`` accept as input.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from cachetools import LRUCache
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from diffserve.api.errors import ConfigError, DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.api.upscale_types import MAX_FACTOR
from diffserve.client import (
    AsyncClient,
    AsyncStream,
    Client,
    CompletedImage,
    ImageEvent,
    LostImage,
    Progress,
    ServerLost,
    ServerUnreachable,
)
from diffserve.media.images import decode_image, format_of
from diffserve.media.infotext import seeds_text
from diffserve.models.references import MAX_REFERENCES
from diffserve.models.references import MAX_SCALE as MAX_REFERENCE_SCALE
from diffserve.service.images.inputs import image_bytes
from diffserve.version import __version__

NUM_RECENT_IMAGES: Final = 16
"""Number of recent images that can be used by name."""

MAX_FILE_BYTES: Final = 20 << 20
CHECK_TIMEOUT_S: Final = 5.0
"""Timeout of the check at the start that the server answers."""

LOOPBACK: Final = "127.0.0.1"
MAX_PORT: Final = 65535
INSTRUCTIONS: Final = (
    "Generates images with a diffserve server. Describe what the image shows. Omit parameters that you have no "
    "preference for, so that the defaults of the model apply. The seed of an image reproduces it; edit_image accepts "
    "its name as input."
)
GENERATE_HINTS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False)
READ_ONLY_HINTS: Final = ToolAnnotations(read_only_hint=True)

Size = Annotated[str, Field(description="WIDTHxHEIGHT in pixels, or auto for the native size of the model.")]
Negative = Annotated[str, Field(description="What to avoid in the image.")]
Seed = Annotated[int | None, Field(description="Reproduces an image. Default: random; the result reports it.", ge=0)]
VariationStrength = Annotated[
    float | None,
    Field(
        description="Amount of variation noise; the images share one seed and differ by this noise.",
        ge=0,
        le=1,
    ),
]
Steps = Annotated[int | None, Field(description="Number of denoising steps. Default: chosen by the model.", ge=1)]
Guidance = Annotated[float | None, Field(description="How closely the image follows the prompt.", ge=0)]
Model = Annotated[str | None, Field(description="Image model of the server. Default: its first.")]
Rewrite = Annotated[
    Literal["off", "auto", "force"],
    Field(description="Whether a language model rewrites the prompt first."),
]
InputImage = Annotated[
    str,
    Field(description="Name of an image that these tools generated, or a PNG, JPEG or WebP as base64 or data URL."),
]
References = Annotated[
    list[str] | None,
    Field(
        description="Images whose content or style the new image follows (IP-Adapter), each given like an input image.",
        max_length=MAX_REFERENCES,
    ),
]
ReferenceScale = Annotated[
    float | None, Field(description="Influence of the references. Default: 1.", ge=0, le=MAX_REFERENCE_SCALE)
]
ReferenceAdapter = Annotated[
    str | None, Field(description="IP-Adapter that reads the references. Default: the only one that fits the model.")
]


class PaintedImage(BaseModel):
    """Name of a generated image, accepted by ``edit_image``, and the seeds that reproduce it."""

    name: str
    seed: int
    variation_seed: int | None = None
    revised_prompt: str | None = None


class ToolImages(BaseModel):
    """The images of a call, in order, and their parameters."""

    images: list[PaintedImage]
    recipe: dict[str, Any]


class UpscaledToolImage(BaseModel):
    """Name of an upscaled image, accepted by the other tools, its size as WIDTHxHEIGHT, and the upscaler."""

    name: str
    size: str
    upscaler: str


class RewrittenPrompts(BaseModel):
    """Prompts for a wish, the most likely first. The wish itself is returned if no rewrite is better."""

    prompts: list[str]
    warnings: list[str]


class Tools:
    """The MCP tools of one server.

    ``reads_files`` allows input images to be paths on this machine.
    """

    def __init__(self, client: AsyncClient, *, reads_files: bool) -> None:
        self._client = client
        self._reads_files = reads_files
        self._recent: LRUCache[str, bytes] = LRUCache(NUM_RECENT_IMAGES)

    def server(self) -> MCPServer[Any]:
        """Create an MCP server that offers the tools."""
        server = MCPServer("diffserve", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
        server.tool(title="Generate images", annotations=GENERATE_HINTS)(self.generate_image)
        server.tool(title="Edit an image", annotations=GENERATE_HINTS)(self.edit_image)
        server.tool(title="Upscale an image", annotations=GENERATE_HINTS)(self.upscale_image)
        server.tool(title="Rewrite a prompt", annotations=READ_ONLY_HINTS)(self.rewrite_prompt)
        return server

    async def generate_image(
        self,
        prompt: Annotated[str, Field(description="Description of the images.")],
        ctx: Context[Any, Any],
        negative_prompt: Negative = "",
        size: Size = "auto",
        n: Annotated[int, Field(description="Number of images, each with its own seed.", ge=1, le=10)] = 1,
        seed: Seed = None,
        variation_strength: VariationStrength = None,
        variation_seed: Seed = None,
        steps: Steps = None,
        guidance_scale: Guidance = None,
        sampler: Annotated[str | None, Field(description="Sampler, such as euler, ddim, dpmpp_2m or unipc.")] = None,
        model: Model = None,
        prompt_rewriter: Rewrite = "off",
        references: References = None,
        reference_scale: ReferenceScale = None,
        reference_adapter: ReferenceAdapter = None,
    ) -> Annotated[CallToolResult, ToolImages]:
        """Generate images from a text prompt."""
        fields = without_none(
            negative_prompt=negative_prompt or None, size=size, n=n, seed=seed, num_inference_steps=steps,
            guidance_scale=guidance_scale, sampler=sampler, model=model, prompt_rewriter=prompt_rewriter,
            variation_strength=variation_strength, variation_seed=variation_seed,
            references=self._references(references, reference_scale, reference_adapter),
        )  # fmt: skip
        return await self._paint(self._client.generate_stream(prompt, **fields), n, ctx)

    async def edit_image(
        self,
        prompt: Annotated[str, Field(description="Description of the whole new image, not only of the change.")],
        image: InputImage,
        ctx: Context[Any, Any],
        mask: Annotated[
            str | None, Field(description="Image of the same size as image; only its transparent parts are changed.")
        ] = None,
        strength: Annotated[float | None, Field(description="Strength of the change, 0 to 1.", ge=0, le=1)] = None,
        negative_prompt: Negative = "",
        size: Size = "auto",
        n: Annotated[int, Field(description="Number of images.", ge=1, le=10)] = 1,
        seed: Seed = None,
        steps: Steps = None,
        guidance_scale: Guidance = None,
        model: Model = None,
        references: References = None,
        reference_scale: ReferenceScale = None,
        reference_adapter: ReferenceAdapter = None,
    ) -> Annotated[CallToolResult, ToolImages]:
        """Generate images from an image and a text prompt, or change only the part that a mask marks."""
        fields = without_none(
            negative_prompt=negative_prompt or None, size=None if size == "auto" else size, n=n, seed=seed,
            num_inference_steps=steps, guidance_scale=guidance_scale, model=model, strength=strength,
            references=self._references(references, reference_scale, reference_adapter),
        )  # fmt: skip
        try:
            start, marked = self._image_bytes(image, "image"), mask and self._image_bytes(mask, "mask")
        except DiffserveError as error:
            raise ToolError(error.message) from None
        return await self._paint(self._client.edit_stream(prompt, start, marked or None, **fields), n, ctx)

    async def upscale_image(
        self,
        image: InputImage,
        upscaler: Annotated[
            str | None, Field(description="Upscaler of the server, lanczos or nearest. Default: the server's own.")
        ] = None,
        scale: Annotated[
            float | None, Field(description="Enlargement. Default: that of the upscaler.", gt=0, le=MAX_FACTOR)
        ] = None,
        size: Annotated[str | None, Field(description="WIDTHxHEIGHT in pixels instead of scale.")] = None,
    ) -> Annotated[CallToolResult, UpscaledToolImage]:
        """Enlarge an image."""
        try:
            fields = without_none(upscaler=upscaler, scale=scale, size=size)
            result = await self._client.upscale(self._image_bytes(image, "image"), **fields)
        except DiffserveError as error:
            raise ToolError(error.message) from None
        self._recent[result.id] = result.file
        described = UpscaledToolImage(name=result.id, size=result.size, upscaler=result.upscaler)
        file = base64.b64encode(result.file).decode("ascii")
        text = "\n".join([f"{described.name}: {described.size}, by {described.upscaler}", *result.warnings])
        content: list[ContentBlock] = [
            ImageContent(type="image", data=file, mime_type=f"image/{result.output_format}"),
            TextContent(type="text", text=text),
        ]
        return CallToolResult(content=content, structured_content=described.model_dump())

    async def rewrite_prompt(
        self,
        prompt: Annotated[str, Field(description="What the image should show, in your own words.")],
        n: Annotated[int, Field(description="Number of prompts.", ge=1, le=10)] = 1,
        style: Annotated[str | None, Field(description="Prompt style. Default: chosen by the server.")] = None,
        seed: Seed = None,
    ) -> Annotated[CallToolResult, RewrittenPrompts]:
        """Rewrite a wish into prompts that suit the image model. No image is generated."""
        try:
            rewritten = await self._client.rewrite(prompt, **without_none(n=n, style=style, seed=seed))
        except DiffserveError as error:
            raise ToolError(error.message) from None
        prompts = [prompt.revised_prompt or prompt.prompt for prompt in rewritten.prompts]
        warnings = [*rewritten.warnings, *(prompt.warning for prompt in rewritten.prompts if prompt.warning)]
        content: list[ContentBlock] = [TextContent(type="text", text=text) for text in prompts]
        structured = RewrittenPrompts(prompts=prompts, warnings=warnings).model_dump()
        return CallToolResult(content=content, structured_content=structured)

    async def _paint(self, stream: AsyncStream[ImageEvent], n: int, ctx: Context[Any, Any]) -> CallToolResult:
        """Follow the events of a request for ``n`` images, report its progress and return its result."""
        painted: dict[int, CompletedImage] = {}
        failures: list[str] = []
        steps: dict[int, int] = {}
        try:
            async with stream:
                async for event in stream:
                    match event:
                        case Progress(image_index=int(index), step=int(step), steps=int(total)):
                            if step > steps.get(index, 0):  # report only increasing progress
                                steps[index] = step
                                seconds = event.seconds_left
                                left = "" if seconds is None else f", about {seconds:.0f} s left"
                                message = f"image {index + 1}: step {step} of {total}{left}"
                                await ctx.report_progress(sum(steps.values()), n * total, message)
                        case CompletedImage(image_index=index):
                            painted[index] = event
                        case LostImage():
                            failures.append(event.failure.message)
        except DiffserveError as error:
            raise ToolError(error.message) from None
        if not painted:
            raise ToolError(" ".join(failures) or "the server finished without an image.")
        return self._result([painted[index] for index in sorted(painted)], failures)

    def _result(self, painted: list[CompletedImage], failures: list[str]) -> CallToolResult:
        first = painted[0]
        images = [
            PaintedImage(
                name=self._remember(image),
                seed=image.seed,
                variation_seed=image.variation_seed,
                revised_prompt=image.revised_prompt,
            )
            for image in painted
        ]
        content: list[ContentBlock] = [
            ImageContent(
                type="image",
                data=base64.b64encode(image.file).decode("ascii"),
                mime_type=f"image/{image.output_format}",
            )
            for image in painted
        ]
        lines = [f"{image.name}: {seeds_text(image.seed, image.variation_seed)}" for image in images]
        lines += list(dict.fromkeys(warning for image in painted for warning in image.warnings)) + failures
        content.append(TextContent(type="text", text="\n".join(lines)))
        excluded = {"image_index", "b64_json", "revised_prompt", "created_at", "score", "similarity"}
        excluded |= {"seed", "variation_seed"}
        recipe = {name: value for name, value in msgspec.to_builtins(first).items() if name not in excluded}
        structured = ToolImages(images=images, recipe=recipe).model_dump()
        return CallToolResult(content=content, structured_content=structured)

    def _remember(self, painted: CompletedImage) -> str:
        name = f"{painted.id}-{painted.image_index}"
        self._recent[name] = painted.file
        return name

    def _references(
        self, images: list[str] | None, scale: float | None, adapter: str | None
    ) -> list[dict[str, Any]] | None:
        """Return the references of a request. Raises ToolError if one of ``images`` is no image."""
        if not images:
            return None
        try:
            files = [self._image_bytes(image, "references") for image in images]
        except DiffserveError as error:
            raise ToolError(error.message) from None
        shared = without_none(name=adapter, scale=scale)
        return [shared | {"image": base64.b64encode(file).decode("ascii")} for file in files]

    def _image_bytes(self, text: str, param: str) -> bytes:
        """Return the image file for an argument: the name of a recent image, a path, base64 or a data URL.

        Raises:
            InvalidRequest: The argument is not an image.
        """
        if text in self._recent:
            return self._recent[text]
        if self._reads_files and (path := as_path(text)) is not None:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidRequest(f"{param}: {str(path)!r} is larger than {MAX_FILE_BYTES >> 20} MiB.", param=param)
            data = path.read_bytes()
            decode_image(data, name=param)  # only images may leave this machine
            return data
        try:
            data = image_bytes(text, param)
            format_of(data, name=param)
        except InvalidRequest:
            hint = f" Known images: {', '.join(self._recent)}." if self._recent else ""
            message = f"{param} is {text[:60]!r}, which is neither a known image name nor base64.{hint}"
            raise InvalidRequest(message, param=param) from None
        return data


def without_none(**fields: object) -> Any:
    """Return the fields that are not None, as arguments for the client."""
    return cast(Mapping[str, Any], {name: value for name, value in fields.items() if value is not None})


def as_path(text: str) -> Path | None:
    """Return the existing file at an absolute path or a path that starts with ``~``, or None."""
    if len(text) > 4096 or not text.startswith(("/", "~")) or "\0" in text:
        return None
    try:
        path = Path(text).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def problem_of(server: str, api_key: str | None) -> str:
    """Return a sentence on why ``server`` does not accept requests, or an empty string if it does."""
    with Client(server, api_key=api_key, timeout_s=CHECK_TIMEOUT_S) as client:
        try:
            client.models()
        except EngineUnavailable:  # the server is loading its models
            return ""
        except (ServerLost, ServerUnreachable):
            return f"the server {server} does not answer."
        except DiffserveError as error:
            return f"the server {server} refuses requests: {error.message}"
    return ""


def check_port(port: int) -> None:
    """Raise ConfigError if ``port`` is not valid, or cannot be listened on."""
    if not 1 <= port <= MAX_PORT:
        raise ConfigError(f"--http must be between 1 and {MAX_PORT}, got {port}.", param="--http")
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {LOOPBACK}:{port}: {reason}; try another --http.", param="--http"
        ) from None


def run(server: str, http_port: int | None, api_key: str | None = None) -> int:
    """Serve the tools until the client disconnects, and return the exit code.

    Args:
        server: Address of the diffserve server.
        http_port: Local port to listen on. None: use standard input and output.
        api_key: API key of the server. None: from the environment.

    Raises:
        ConfigError: The server cannot listen on ``http_port``.
    """
    if http_port is not None:
        check_port(http_port)
    if problem := problem_of(server, api_key):
        print(f"diffserve: {problem} Tool calls fail until it does.", file=sys.stderr, flush=True)
    tools = Tools(AsyncClient(server, api_key=api_key), reads_files=http_port is None)
    if http_port is None:
        tools.server().run("stdio")
    else:
        tools.server().run("streamable-http", host=LOOPBACK, port=http_port)
    return 0
