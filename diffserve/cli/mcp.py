"""``diffserve mcp``: a running server's pictures as tools of the Model Context Protocol, for assistants that speak it.

The tools paint through ``diffserve.client``; pictures come back as image content, how they were painted as structured
content, and while they are painted their steps as progress. What is cancelled there is hung up on here, and costs the
server one more step at most. Pictures painted here go by names, by which ``edit_image`` takes them again.
"""

from __future__ import annotations

import base64
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
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
from diffserve.media.infotext import seeds_told
from diffserve.service.images.pictures_in import picture_bytes
from diffserve.version import __version__

NUM_KEPT: Final = 16
"""Pictures that can be named again; the oldest go first."""

MAX_FILE_BYTES: Final = 20 << 20
ANSWER_S: Final = 5.0
"""How long the server may take to answer at the start."""

LOOPBACK: Final = "127.0.0.1"
INSTRUCTIONS: Final = (
    "Paints pictures with a diffserve server. Say what is to be seen; leave out what you have no wish for, so that the "
    "model's own defaults hold. A picture's seed repeats it, and its name lets edit_image start from it."
)
PAINTS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False)
READS: Final = ToolAnnotations(read_only_hint=True)

Size = Annotated[str, Field(description="WIDTHxHEIGHT in pixels, or auto: as the model does best.")]
Negative = Annotated[str, Field(description="What is not to be seen.")]
Seed = Annotated[int | None, Field(description="Repeats a picture; left out: drawn, and told.", ge=0)]
Varied = Annotated[
    float | None,
    Field(description="How far pictures of one seed differ, by the noise of variation_seed and the next.", ge=0, le=1),
]
Steps = Annotated[int | None, Field(description="Denoising steps; left out: the model's own.", ge=1)]
Guidance = Annotated[float | None, Field(description="How closely the prompt is followed.", ge=0)]
Model = Annotated[str | None, Field(description="One of the server's image models; left out: its first.")]
Rewrite = Annotated[
    Literal["off", "auto", "force"], Field(description="Whether the server's language model words the prompt first.")
]
Given = Annotated[
    str, Field(description="The name of a picture painted here, or PNG, JPEG or WebP as base64 or a data URL.")
]


class PaintedImage(BaseModel):
    """A picture, by the name that ``edit_image`` takes, and what repeats it."""

    name: str
    seed: int
    variation_seed: int | None = None
    revised_prompt: str | None = None


class ToolImages(BaseModel):
    """All pictures of a call, in order, and how they were painted."""

    images: list[PaintedImage]
    recipe: dict[str, Any]


class RewrittenPrompts(BaseModel):
    """Prompts for a wish, the likeliest first; the wish itself where it is best painted as it stands."""

    prompts: list[str]
    warnings: list[str]


class Tools:
    """The tools over one ``client``. ``reads_files``: whether a picture may be a path on this machine."""

    def __init__(self, client: AsyncClient, *, reads_files: bool) -> None:
        self._client = client
        self._reads_files = reads_files
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def server(self) -> MCPServer[Any]:
        """An MCP server that offers them."""
        server = MCPServer("diffserve", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
        server.tool(title="Paint a picture", annotations=PAINTS)(self.generate_image)
        server.tool(title="Paint from a picture", annotations=PAINTS)(self.edit_image)
        server.tool(title="Word a wish for the image model", annotations=READS)(self.rewrite_prompt)
        return server

    async def generate_image(
        self,
        prompt: Annotated[str, Field(description="What is to be seen.")],
        ctx: Context[Any, Any],
        negative_prompt: Negative = "",
        size: Size = "auto",
        n: Annotated[int, Field(description="How many pictures, each from a seed of its own.", ge=1, le=10)] = 1,
        seed: Seed = None,
        variation_strength: Varied = None,
        variation_seed: Seed = None,
        steps: Steps = None,
        guidance_scale: Guidance = None,
        sampler: Annotated[str | None, Field(description="Such as euler, ddim, dpmpp_2m, unipc.")] = None,
        model: Model = None,
        prompt_rewriter: Rewrite = "off",
    ) -> Annotated[CallToolResult, ToolImages]:
        """Paint pictures from a text."""
        fields = given(
            negative_prompt=negative_prompt or None, size=size, n=n, seed=seed, num_inference_steps=steps,
            guidance_scale=guidance_scale, sampler=sampler, model=model, prompt_rewriter=prompt_rewriter,
            variation_strength=variation_strength, variation_seed=variation_seed,
        )  # fmt: skip
        return await self._paint(self._client.generate_stream(prompt, **fields), n, ctx)

    async def edit_image(
        self,
        prompt: Annotated[str, Field(description="What the new picture shows, all of it, not only what changes.")],
        image: Given,
        ctx: Context[Any, Any],
        mask: Annotated[
            str | None, Field(description="As image, of the same size: only what is transparent there is painted.")
        ] = None,
        strength: Annotated[float | None, Field(description="How much is painted anew, 0 to 1.", ge=0, le=1)] = None,
        negative_prompt: Negative = "",
        size: Size = "auto",
        n: Annotated[int, Field(description="How many pictures.", ge=1, le=10)] = 1,
        seed: Seed = None,
        steps: Steps = None,
        guidance_scale: Guidance = None,
        model: Model = None,
    ) -> Annotated[CallToolResult, ToolImages]:
        """Paint pictures from a picture and a text, or repaint the part of it that a mask marks."""
        fields = given(
            negative_prompt=negative_prompt or None, size=None if size == "auto" else size, n=n, seed=seed,
            num_inference_steps=steps, guidance_scale=guidance_scale, model=model, strength=strength,
        )  # fmt: skip
        try:
            start, marked = self._picture(image, "image"), mask and self._picture(mask, "mask")
        except DiffserveError as error:
            raise ToolError(error.message) from None
        return await self._paint(self._client.edit_stream(prompt, start, marked or None, **fields), n, ctx)

    async def rewrite_prompt(
        self,
        prompt: Annotated[str, Field(description="A wish, in any words.")],
        n: Annotated[int, Field(description="How many prompts.", ge=1, le=10)] = 1,
        style: Annotated[str | None, Field(description="One of the server's styles; left out: its own.")] = None,
        seed: Seed = None,
    ) -> Annotated[CallToolResult, RewrittenPrompts]:
        """Turn a wish into prompts that the image model reads well; nothing is painted."""
        try:
            told = await self._client.rewrite(prompt, **given(n=n, style=style, seed=seed))
        except DiffserveError as error:
            raise ToolError(error.message) from None
        prompts = [one.revised_prompt or one.prompt for one in told.prompts]
        said = [*told.warnings, *(one.warning for one in told.prompts if one.warning)]
        content: list[ContentBlock] = [TextContent(type="text", text=prompt) for prompt in prompts]
        structured = RewrittenPrompts(prompts=prompts, warnings=said).model_dump()
        return CallToolResult(content=content, structured_content=structured)

    async def _paint(self, stream: AsyncStream[ImageEvent], n: int, ctx: Context[Any, Any]) -> CallToolResult:
        """What the events of ``stream``, of ``n`` pictures, come to, told step by step."""
        painted: dict[int, CompletedImage] = {}
        lost: list[str] = []
        steps: dict[int, int] = {}
        try:
            async with stream:
                async for event in stream:
                    match event:
                        case Progress(image_index=int(index), step=int(step), steps=int(total)):
                            if step > steps.get(index, 0):  # progress is told when there is more of it
                                steps[index] = step
                                seconds = event.seconds_left
                                left = "" if seconds is None else f", about {seconds:.0f} s left"
                                said = f"picture {index + 1}: step {step} of {total}{left}"
                                await ctx.report_progress(sum(steps.values()), n * total, said)
                        case CompletedImage(image_index=index):
                            painted[index] = event
                        case LostImage():
                            lost.append(event.failure.message)
        except DiffserveError as error:
            raise ToolError(error.message) from None
        if not painted:
            raise ToolError(" ".join(lost) or "the server finished without a picture.")
        return self._result([painted[index] for index in sorted(painted)], lost)

    def _result(self, painted: list[CompletedImage], lost: list[str]) -> CallToolResult:
        first = painted[0]
        images = [
            PaintedImage(
                name=self._keep(one),
                seed=one.seed,
                variation_seed=one.variation_seed,
                revised_prompt=one.revised_prompt,
            )
            for one in painted
        ]
        content: list[ContentBlock] = [
            ImageContent(
                type="image", data=base64.b64encode(one.file).decode("ascii"), mime_type=f"image/{one.output_format}"
            )
            for one in painted
        ]
        said = [f"{one.name}: {seeds_told(one.seed, one.variation_seed)}" for one in images]
        said += list(dict.fromkeys(warning for one in painted for warning in one.warnings)) + lost
        content.append(TextContent(type="text", text="\n".join(said)))
        own = {"image_index", "b64_json", "revised_prompt", "created_at", "score", "similarity"}
        own |= {"seed", "variation_seed"}
        recipe = {name: value for name, value in msgspec.to_builtins(first).items() if name not in own}
        structured = ToolImages(images=images, recipe=recipe).model_dump()
        return CallToolResult(content=content, structured_content=structured)

    def _keep(self, painted: CompletedImage) -> str:
        name = f"{painted.id}-{painted.image_index}"
        self._kept[name] = painted.file
        while len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return name

    def _picture(self, text: str, param: str) -> bytes:
        """The file that ``text`` names or is. Raises InvalidRequest."""
        if text in self._kept:
            return self._kept[text]
        if self._reads_files and (path := as_path(text)) is not None:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidRequest(f"{param}: {str(path)!r} has more than {MAX_FILE_BYTES >> 20} MiB.", param=param)
            data = path.read_bytes()
            decode_image(data, name=param)  # nothing but a picture leaves this machine
            return data
        try:
            data = picture_bytes(text, param)
            format_of(data, name=param)
        except InvalidRequest:
            known = f" Pictures painted here: {', '.join(self._kept)}." if self._kept else ""
            message = f"{param} is {text[:60]!r}, which is neither a picture painted here nor one as base64.{known}"
            raise InvalidRequest(message, param=param) from None
        return data


def given(**fields: object) -> Any:
    """Those of ``fields`` that something is said of, as the client takes them."""
    return cast(Mapping[str, Any], {name: value for name, value in fields.items() if value is not None})


def as_path(text: str) -> Path | None:
    """The file that ``text`` names, by its absolute path or from the home; ``None`` where there is none."""
    if len(text) > 4096 or not text.startswith(("/", "~")) or "\0" in text:
        return None
    try:
        path = Path(text).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def problem_of(server: str, api_key: str | None) -> str:
    """Return why the tools could not work now, in one sentence; empty where ``server`` answers."""
    with Client(server, api_key=api_key, timeout_s=ANSWER_S) as client:
        try:
            client.models()
        except EngineUnavailable:  # it loads its models
            return ""
        except (ServerLost, ServerUnreachable):
            return f"the server {server} does not answer."
        except DiffserveError as error:
            return f"the server {server} refuses requests: {error.message}"
    return ""


def run(server: str, http_port: int | None, api_key: str | None = None) -> int:
    """Serve until the other side hangs up: on standard input and output, or over HTTP to this machine alone."""
    if problem := problem_of(server, api_key):
        print(f"diffserve: {problem} The tools fail until it does.", file=sys.stderr, flush=True)
    tools = Tools(AsyncClient(server, api_key=api_key), reads_files=http_port is None)
    if http_port is None:
        tools.server().run("stdio")
    else:
        tools.server().run("streamable-http", host=LOOPBACK, port=http_port)
    return 0
