"""Provenance marks: XMP, watermark, and content credentials that are signed with a real certificate chain."""

from __future__ import annotations

import socket
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.media.content_credentials import Signer
from diffserve.media.images import DIGITAL_SOURCE_TYPES, ImageFormat, decode_image
from diffserve.media.provenance import Marks, examine
from tests.certificates import make_chain
from tests.test_watermark import photo

FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


@pytest.mark.parametrize("image_format", FORMATS)
def test_every_file_has_its_marks_and_a_plain_file_has_none(image_format: ImageFormat) -> None:
    picture = photo(1, 128)
    for marks, has_mark in ((Marks(), True), (Marks(watermark=False), False)):
        assert marks.header == ("xmp;wm" if has_mark else "xmp")
        for kind, source in DIGITAL_SOURCE_TYPES.items():
            marked = marks.mark(picture, kind)
            file = marks.write(
                marked, kind=kind, image_format=image_format, quality=90, infotext="a\nSteps: 1, Seed: 2, Size: 8x8"
            )
            provenance = examine(file)
            assert provenance.is_generated
            assert provenance.parameters
            assert provenance.c2pa is None
            assert provenance.xmp is not None
            assert provenance.xmp.digital_source_type == source
            assert provenance.xmp.creator_tool.startswith("diffserve ")
            assert (provenance.watermark.kind if provenance.watermark else None) == (kind if has_mark else None)
    unmarked = BytesIO()
    Image.fromarray(picture.array).save(unmarked, image_format.upper())
    assert examine(unmarked.getvalue()).to_dict() == {
        "is_generated": False, "xmp": None, "watermark": None, "c2pa": None, "parameters": False,
    }  # fmt: skip


def test_xmp_of_other_tools_is_read_and_malformed_xmp_is_ignored() -> None:
    def examined(xmp: str) -> tuple[bool, str]:
        file = BytesIO()
        Image.new("RGB", (64, 64)).save(file, "JPEG", xmp=xmp.encode())
        provenance = examine(file.getvalue())
        return provenance.is_generated, provenance.xmp.digital_source_type if provenance.xmp else ""

    generated = DIGITAL_SOURCE_TYPES["generated"]
    assert examined(f"<x><Iptc4xmpExt:DigitalSourceType>{generated}</Iptc4xmpExt:DigitalSourceType></x>") == (
        True,
        generated,
    )
    camera = generated.replace("trainedAlgorithmicMedia", "digitalCapture")
    assert examined(f"<x Iptc4xmpExt:DigitalSourceType='{camera}'/>") == (False, camera)
    assert examined("DigitalSourceType=" * 3000) == (False, "")
    assert examined("<!ENTITY a '&b;'>" * 100) == (False, "")


def test_content_credentials_are_invalid_after_a_change_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    files = make_chain(tmp_path, "a painter")
    marks, picture = Marks(signer=Signer(str(files.chain), str(files.key))), photo(1, 64)
    assert marks.header == "c2pa;xmp;wm"
    assert marks.without_watermark().header == "c2pa;xmp"
    for image_format in FORMATS:
        marked = marks.mark(picture, "composite")
        signed = marks.write(marked, kind="composite", image_format=image_format, quality=100)
        plain = Marks().write(marked, kind="composite", image_format=image_format, quality=100)
        assert decode_image(signed) == decode_image(plain)
        provenance = examine(signed).c2pa
        assert provenance is not None
        assert (provenance.state, provenance.signer, provenance.generator) == ("valid", "a painter", "diffserve")
        assert provenance.digital_source_type == DIGITAL_SOURCE_TYPES["composite"]
    signed_text, forged_text = (f"a, Steps: {steps}" for steps in (1, 2))
    jpeg = marks.write(picture, kind="generated", image_format="jpeg", quality=100, infotext=signed_text)
    forged = examine(jpeg.replace(signed_text.encode("utf-16-be"), forged_text.encode("utf-16-be")))
    assert forged.c2pa is not None
    assert forged.c2pa.state == "invalid"


def test_a_remote_manifest_is_not_fetched() -> None:
    pytest.importorskip("c2pa")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/manifest.c2pa"
        xmp = f"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
        <rdf:Description rdf:about="" xmlns:dcterms="http://purl.org/dc/terms/" dcterms:provenance="{url}"/>
        </rdf:RDF></x:xmpmeta>"""
        file = BytesIO()
        Image.new("RGB", (64, 64)).save(file, "JPEG", xmp=xmp.encode())
        provenance = examine(file.getvalue())
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert provenance.c2pa is not None, "the reference was read"
    assert (provenance.c2pa.state, provenance.is_generated) == ("invalid", False)


def test_a_certificate_that_cannot_sign_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    files = make_chain(tmp_path, "a painter")
    (tmp_path / "other").mkdir()
    other = make_chain(tmp_path / "other", "another")
    with pytest.raises(ConfigError, match="cannot sign an image"):
        Signer(str(files.chain), str(other.key))
    with pytest.raises(ConfigError, match="cannot sign an image"):
        Signer(str(files.key), str(files.key))
    with pytest.raises(ConfigError, match="c2pa_key 'nowhere' cannot be read"):
        Signer(str(files.chain), "nowhere")


def test_a_file_that_is_not_an_image_is_refused_with_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"a\.png is not a PNG, JPEG or WebP file"):
        examine(b"GIF89a", name="a.png")
