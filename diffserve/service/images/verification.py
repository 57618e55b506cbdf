"""``POST /v1/provenance/verify``: reads the provenance of an image, which is not stored."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import InvalidRequest
from diffserve.media.decoders import ImageDecoder, shared_decoders
from diffserve.media.provenance import ProvenanceReport
from diffserve.service.http.addresses import Clients
from diffserve.service.http.bodies import Body
from diffserve.service.http.forms import is_form, parse_fields, read_form
from diffserve.service.images.fetching import Fetcher
from diffserve.service.images.inputs import image_bytes
from diffserve.service.lifecycle import json_response, read_body, while_connected

UPLOADS: Final[dict[str, Any]] = {"image": {"type": "string", "format": "binary"}}


class VerifyBody(Body):
    """Image to verify: base64, a data URL, or an uploaded file of a form."""

    model_config = ConfigDict(title="VerifyProvenanceRequest")

    image: Annotated[str, Field(min_length=1, description="Image in base64, or a data URL.")] | None = None


class Verification:
    """Endpoint of provenance verification; examines one image of each client at a time."""

    def __init__(self, fetcher: Fetcher, clients: Clients) -> None:
        self._fetcher = fetcher
        self._clients = clients

    async def __call__(self, request: Request) -> Response:
        """Answer one request. Raises InvalidRequest if the file is not an image."""
        files: list[bytes] = []
        if is_form(request):
            form = await read_form(request, max_files=1)
            files = form.files.get("image", [])
            body = parse_fields(VerifyBody, form.fields)
        else:
            body = await read_body(request, VerifyBody)
        if not files and body.image is None:
            message = "image is missing; upload a PNG, JPEG or WebP file, or send it in base64."
            raise InvalidRequest(message, param="image", code="missing_required_parameter")
        await self._fetcher.fill(body)

        def examine(decoder: ImageDecoder) -> ProvenanceReport:
            return decoder.examine(files[0] if files else image_bytes(body.image or "", "image"))

        with self._clients.name_of(request) as client:
            provenance = await while_connected(request, shared_decoders().run(client, examine))
        content = {"object": "provenance.verification", **provenance.to_dict()}
        return json_response(msgspec.json.encode(content), body.warnings)
