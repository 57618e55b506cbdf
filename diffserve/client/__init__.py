"""A diffserve server from Python: typed, plain and asynchronous, with streams. No torch.

from diffserve.client import Client

with Client("http://127.0.0.1:8000") as client:
    client.generate("a penguin", seed=7).images[0].save("penguin.png")
"""

from __future__ import annotations

from diffserve.client.answers import (
    Chat,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    CompletedImage,
    Failure,
    ImageEvent,
    ImageFile,
    Images,
    LostImage,
    Model,
    PartialImage,
    Progress,
    RewriteDelta,
    RewriteEvent,
    Rewrites,
    RewrittenPrompt,
    TextTimings,
    TextUsage,
)
from diffserve.client.asynchronous import AsyncClient, AsyncStream
from diffserve.client.calls import DEFAULT_URL, ChatFields, RewriteFields
from diffserve.client.capabilities import Capabilities, ImageCapabilities, LanguageCapabilities, SamplerChoice, World
from diffserve.client.errors import RequestCancelled, ServerLost, ServerUnreachable
from diffserve.client.on_behalf import Asker, ask_for
from diffserve.client.recipe import ImageFields, ImageUsage, RewriterFields, StreamedImageFields
from diffserve.client.sync import Client, Stream

__all__ = [
    "DEFAULT_URL",
    "Asker",
    "AsyncClient",
    "AsyncStream",
    "Capabilities",
    "Chat",
    "ChatChoice",
    "ChatDelta",
    "ChatFields",
    "ChatMessage",
    "Client",
    "CompletedImage",
    "Failure",
    "ImageCapabilities",
    "ImageEvent",
    "ImageFields",
    "ImageFile",
    "ImageUsage",
    "Images",
    "LanguageCapabilities",
    "LostImage",
    "Model",
    "PartialImage",
    "Progress",
    "RequestCancelled",
    "RewriteDelta",
    "RewriteEvent",
    "RewriteFields",
    "RewriterFields",
    "Rewrites",
    "RewrittenPrompt",
    "SamplerChoice",
    "ServerLost",
    "ServerUnreachable",
    "Stream",
    "StreamedImageFields",
    "TextTimings",
    "TextUsage",
    "World",
    "ask_for",
]
