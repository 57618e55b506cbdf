"""What pictures of ours bear, and what is read from any: XMP, the mark, and content credentials of a real chain."""

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
def test_every_file_says_what_made_it_and_a_bare_one_says_nothing(image_format: ImageFormat) -> None:
    picture = photo(1, 128)
    for marks, has_mark in ((Marks(), True), (Marks(watermark=False), False)):
        assert marks.header == ("xmp;wm" if has_mark else "xmp")
        for kind, source in DIGITAL_SOURCE_TYPES.items():
            marked = marks.mark(picture, kind)
            file = marks.write(
                marked, kind=kind, image_format=image_format, quality=90, infotext="a\nSteps: 1, Seed: 2, Size: 8x8"
            )
            found = examine(file)
            assert found.is_generated
            assert found.parameters
            assert found.c2pa is None
            assert found.xmp is not None
            assert found.xmp.digital_source_type == source
            assert found.xmp.creator_tool.startswith("diffserve ")
            assert (found.watermark.kind if found.watermark else None) == (kind if has_mark else None)
    bare = BytesIO()
    Image.fromarray(picture.array).save(bare, image_format.upper())
    assert examine(bare.getvalue()).told() == {
        "is_generated": False, "xmp": None, "watermark": None, "c2pa": None, "parameters": False,
    }  # fmt: skip


def test_what_others_wrote_as_xmp_is_read_and_what_is_hostile_does_no_harm() -> None:
    def examined(xmp: str) -> tuple[bool, str]:
        file = BytesIO()
        Image.new("RGB", (64, 64)).save(file, "JPEG", xmp=xmp.encode())
        found = examine(file.getvalue())
        return found.is_generated, found.xmp.digital_source_type if found.xmp else ""

    ours = DIGITAL_SOURCE_TYPES["generated"]
    assert examined(f"<x><Iptc4xmpExt:DigitalSourceType>{ours}</Iptc4xmpExt:DigitalSourceType></x>") == (True, ours)
    camera = ours.replace("trainedAlgorithmicMedia", "digitalCapture")
    assert examined(f"<x Iptc4xmpExt:DigitalSourceType='{camera}'/>") == (False, camera)
    assert examined("DigitalSourceType=" * 3000) == (False, "")
    assert examined("<!ENTITY a '&b;'>" * 100) == (False, "")


def test_content_credentials_are_signed_read_and_missed_where_a_byte_has_changed(tmp_path: Path) -> None:
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
        found = examine(signed).c2pa
        assert found is not None
        assert (found.state, found.signer, found.generator) == ("valid", "a painter", "diffserve")
        assert found.digital_source_type == DIGITAL_SOURCE_TYPES["composite"]
    told, lie = (f"a, Steps: {steps}" for steps in (1, 2))
    jpeg = marks.write(picture, kind="generated", image_format="jpeg", quality=100, infotext=told)
    forged = examine(jpeg.replace(told.encode("utf-16-be"), lie.encode("utf-16-be")))
    assert forged.c2pa is not None
    assert forged.c2pa.state == "invalid"


def test_a_manifest_that_lies_elsewhere_is_not_fetched() -> None:
    pytest.importorskip("c2pa")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/manifest.c2pa"
        xmp = f"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
        <rdf:Description rdf:about="" xmlns:dcterms="http://purl.org/dc/terms/" dcterms:provenance="{url}"/>
        </rdf:RDF></x:xmpmeta>"""
        file = BytesIO()
        Image.new("RGB", (64, 64)).save(file, "JPEG", xmp=xmp.encode())
        found = examine(file.getvalue())
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert found.c2pa is not None, "it was looked for"
    assert (found.c2pa.state, found.is_generated) == ("invalid", False)


def test_a_certificate_that_cannot_sign_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    files = make_chain(tmp_path, "a painter")
    (tmp_path / "other").mkdir()
    other = make_chain(tmp_path / "other", "another")
    with pytest.raises(ConfigError, match="cannot sign a picture"):
        Signer(str(files.chain), str(other.key))
    with pytest.raises(ConfigError, match="cannot sign a picture"):
        Signer(str(files.key), str(files.key))
    with pytest.raises(ConfigError, match="c2pa_key 'nowhere' cannot be read"):
        Signer(str(files.chain), "nowhere")


def test_what_is_no_picture_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"a\.png is not a PNG, JPEG or WebP file"):
        examine(b"GIF89a", name="a.png")
