"""Image files: encoding and decoding round trips, infotext, and early refusal of malicious files."""

from __future__ import annotations

import struct
import time
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageCms

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest, ImageResult, Picture, Timings
from diffserve.media import infotext
from diffserve.media.images import (
    DIGITAL_SOURCE_TYPE,
    ImageFormat,
    decode_image,
    decode_mask,
    decode_with_mask,
    encode_image,
    has_transparency,
    image_format_of,
    read_infotext,
    resize,
    thumbnail,
)
from diffserve.media.infotext import MAX_BYTES, SOFTWARE, parse_infotext, shorten, write_infotext
from diffserve.models.loras import Lora

FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


def gradient(width_px: int = 24, height_px: int = 16) -> Picture:
    columns = np.linspace(0, 255, width_px, dtype=np.uint8)[None, :, None]
    rows = np.linspace(0, 255, height_px, dtype=np.uint8)[:, None, None]
    pixels = np.broadcast_to(
        np.concatenate([columns + 0 * rows, rows + 0 * columns, columns // 2 + rows // 2], axis=2),
        (height_px, width_px, 3),
    )
    return Picture.from_array(np.ascontiguousarray(pixels))


def result(**changes: Any) -> ImageResult:
    default_result = ImageResult(
        request_id="img-1",
        image_index=0,
        seed=42,
        picture=gradient(),
        timings=Timings(queue_s=0, encode_s=0, denoise_s=0, decode_s=0, step_s=0),
        prompt="a fox next to a cactus",
        negative_prompt="",
        sampler="dpmpp_2m",
        num_steps=25,
        num_evaluations=50,
        guidance_scale=3.0,
        eta=0.0,
        spacing="trailing",
        sigma_schedule="karras",
        model="embedded",
        model_digest="sha256:0123456789abcdef",
    )
    return msgspec.structs.replace(default_result, **changes)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_infotext_has_the_format_that_other_tools_read() -> None:
    text = write_infotext(result(negative_prompt="blurry"), width_px=24, height_px=16)
    assert text == (
        "a fox next to a cactus\n"
        "Negative prompt: blurry\n"
        "Steps: 25, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 3, Seed: 42, Size: 24x16, "
        f"Model hash: 0123456789, Model: embedded, RNG: CPU, Spacing: trailing, Version: {SOFTWARE}"
    )


def test_guidance_interval_with_negative_zero_has_one_dash() -> None:
    text = write_infotext(result(guidance_interval=(-0.0, 0.5)), width_px=24, height_px=16)
    assert parse_infotext(text).fields["Guidance interval"] == "0-0.5"


def test_infotext_contains_the_cache_interval_if_it_is_not_one() -> None:
    fields = parse_infotext(write_infotext(result(cache_interval=3), width_px=24, height_px=16)).fields
    assert fields["Cache interval"] == "3"
    assert "Cache interval" not in write_infotext(result(), width_px=24, height_px=16)


def test_loras_are_written_as_prompt_tags_and_read_back() -> None:
    loras = (Lora("ink"), Lora("fur v2", -0.35))
    read = parse_infotext(write_infotext(result(loras=loras), width_px=24, height_px=16))
    assert read.prompt.endswith(" <lora:ink:1> <lora:fur v2:-0.35>")
    repeated = GenerationRequest(prompt=read.prompt)
    assert (repeated.prompt, repeated.diffusion.loras) == (result().prompt, loras)
    assert GenerationRequest(prompt="a <lora:ink>fox <loral:x>").prompt == "a fox <loral:x>"


def test_infotext_contains_the_similarity_of_reused_latents() -> None:
    resumed = result(similarity_threshold=0.9, similarity=0.9712, skipped_steps=8)
    assert "Similarity threshold: 0.9, Similarity: 0.9712, Skipped steps: 8, " in write_infotext(
        resumed, width_px=24, height_px=16
    )
    assert "Similar" not in write_infotext(result(), width_px=24, height_px=16)


def test_infotext_contains_refiner_and_score_if_they_were_used() -> None:
    refined = result(switch_at=0.75, refiner="xl-refiner [0123456789]", score=0.25)
    assert "Refiner: xl-refiner [0123456789], Refiner switch at: 0.75, Score: 0.25, " in write_infotext(
        refined, width_px=24, height_px=16
    )
    assert not {"Refiner", "Score"} & set(parse_infotext(write_infotext(result(), width_px=24, height_px=16)).fields)


@pytest.mark.parametrize(("source", "label"), [("cpu", "CPU"), ("device", "NV")])
def test_infotext_contains_the_noise_source_with_the_label_of_a1111(source: str, label: str) -> None:
    text = write_infotext(result(noise_source=source), width_px=24, height_px=16)
    assert parse_infotext(text).fields["RNG"] == label


def test_infotext_contains_the_denoising_strength() -> None:
    fields = parse_infotext(write_infotext(result(strength=0.35), width_px=24, height_px=16)).fields
    assert fields["Denoising strength"] == "0.35"


def test_infotext_of_a_resized_image_contains_the_generated_size() -> None:
    fields = parse_infotext(write_infotext(result(), width_px=512, height_px=512)).fields
    assert (fields["Size"], fields["Painted size"]) == ("512x512", "24x16")


@pytest.mark.parametrize(
    ("prompt", "negative"),
    [
        ("a fox", ""),
        ("a fox\non two lines", "rain,\nsnow: much"),
        ("Steps: 3, Sampler: none, Seed: 4", "CFG scale: 2, Size: 1x1, Seed: 5"),
        ("狐狸 🦊 и кактус", "<script>alert(1)</script>"),
        ('she said "fox", twice', "{{7*7}} %s%n"),
    ],
)
def test_infotext_survives_a_round_trip(prompt: str, negative: str) -> None:
    model = 'fox: the "big", one'
    text = write_infotext(result(prompt=prompt, negative_prompt=negative, model=model), width_px=24, height_px=16)
    read = parse_infotext(text)
    assert (read.prompt, read.negative_prompt) == (prompt, negative)
    assert (read.fields["Model"], read.fields["Steps"], read.fields["Seed"]) == (model, "25", "42")


@pytest.mark.parametrize(
    "wish",
    [
        "something cosy",
        'a "sign", at night: yes',
        '"all of it"',
        "two\nlines\r\nand tabs\t",
        " 狐 \\ ",
        "Steps: 3, a: b",
    ],
)
def test_infotext_keeps_the_original_prompt_of_a_rewrite(wish: str) -> None:
    text = write_infotext(result(original_prompt=wish), width_px=24, height_px=16)
    read = parse_infotext(text)
    assert read.prompt == "a fox next to a cactus"
    assert read.fields["Original prompt"] == wish.replace("\r\n", "\n")
    assert read.fields["Seed"] == "42"
    assert text.count("\n") == 1
    assert 'Original prompt: "' in text


@pytest.mark.parametrize("image_format", FORMATS)
def test_an_original_prompt_that_is_too_long_is_left_out_of_the_file(image_format: ImageFormat) -> None:
    long_result = result(prompt="fox " * 100, original_prompt="wish " * 1500)
    text = write_infotext(long_result, width_px=24, height_px=16)
    assert parse_infotext(text).fields["Original prompt"] == long_result.original_prompt
    longer_text = text.replace("wish ", "wish wish ")
    stored = read_infotext(encode_image(long_result.picture, image_format=image_format, infotext=longer_text))
    assert stored is not None
    assert (parse_infotext(stored).fields["Seed"], "Original prompt" in stored) == ("42", False)


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize(
    "fields",
    [{"prompt": "狐狸" * 16_000}, {"prompt": "a fox", "negative_prompt": "é" * 32_000}, {"prompt": "a\n" * 16_000}],
    ids=["prompt", "negative", "lines"],
)
def test_a_shortened_prompt_is_marked_as_shortened_in_every_format(
    image_format: ImageFormat, fields: dict[str, str]
) -> None:
    text = write_infotext(result(**fields), width_px=24, height_px=16)
    stored = read_infotext(encode_image(gradient(), image_format=image_format, infotext=text))
    assert stored is not None
    assert MAX_BYTES - 4 < len(stored.encode()) <= MAX_BYTES
    read = parse_infotext(stored)
    assert read.is_shortened
    assert read.fields["Seed"] == "42"
    assert not parse_infotext(write_infotext(result(prompt="a fox…"), width_px=24, height_px=16)).is_shortened


def hostile_png(text: bytes) -> bytes:
    """Return a small PNG file whose uncompressed ``parameters`` chunk holds ``text``."""
    png = encode_image(gradient())
    return png[:33] + png_chunk(b"tEXt", b"parameters\0" + text) + png[33:]


@pytest.mark.parametrize(
    "pair",
    ["k{i}: v, ", "k{i}:  " + " " * 8, 'k{i}: "\\q, ', 'k{i}: "a\\", ', 'k{i}: "\t, ', "k{i}: {{[, ", "k:", ", ", "k "],
    ids=["pairs", "blanks", "bad-escapes", "open-quotes", "control", "brackets", "colons", "commas", "no-colon"],
)
def test_parsing_time_is_linear_in_the_number_of_pairs(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infotext, "MAX_BYTES", 100_000_000)

    def seconds(num_pairs: int) -> float:
        text = "".join(pair.replace("{i}", str(i)) for i in range(num_pairs))
        durations_s = []
        for _ in range(3):
            started_s = time.thread_time()
            parse_infotext(text)
            durations_s.append(time.thread_time() - started_s)
        return min(durations_s)

    assert seconds(80_000) < 30 * max(seconds(8_000), 0.001)  # a hundredfold if it were quadratic


def test_a_text_that_is_too_long_is_refused_quickly() -> None:
    text = ", ".join(f"k{i}: v" for i in range(60_000)).encode()
    started_s = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"have \d{6} bytes; at most 8192") as caught:
        read_infotext(hostile_png(text))
    assert caught.value.code == "parameters_too_long"
    with pytest.raises(InvalidRequest, match="at most 8192"):
        parse_infotext(text.decode())
    assert time.thread_time() - started_s < 1.0  # parsing it would take more than ten seconds


def test_a_text_of_the_maximum_length_is_read_completely() -> None:
    prompt = "x" * (MAX_BYTES - len("\nSteps: 1, Seed: 2, Size: 3x3"))
    text = f"{prompt}\nSteps: 1, Seed: 2, Size: 3x3"
    assert read_infotext(hostile_png(text.encode())) == text
    assert parse_infotext(text).prompt == prompt
    with pytest.raises(InvalidRequest):
        read_infotext(hostile_png(f"x{text}".encode()))


def test_an_unpaired_surrogate_in_a_value_is_replaced() -> None:
    fields = parse_infotext('fox\nSteps: 1, Seed: 2, Model: "a\\ud800b", Other: "\\ud83e\\udd8a"').fields
    assert (fields["Model"], fields["Other"]) == ("a?b", "🦊")


@pytest.mark.parametrize(
    ("sampler", "eta", "written"),
    [
        ("euler_a", 0.0, "0"),
        ("euler_a", 1.0, None),
        ("euler_a", 0.123456789, "0.123456789"),
        ("ddim", 0.0, None),
        ("ddim", 1.0, "1"),
        ("dpmpp_2m", 0.0, None),
        ("of another tool", 0.5, "0.5"),
    ],
)
def test_eta_is_written_if_it_is_not_the_default_of_the_sampler(sampler: str, eta: float, written: str | None) -> None:
    text = write_infotext(result(sampler=sampler, eta=eta), width_px=24, height_px=16)
    assert parse_infotext(text).fields.get("Eta") == written


@pytest.mark.parametrize(
    ("scale", "written"),
    [(7.0, "7"), (7.5, "7.5"), (0.0, "0"), (2.123456789, "2.123456789"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_a_guidance_scale_keeps_every_digit_and_no_more(scale: float, written: str) -> None:
    text = write_infotext(result(guidance_scale=scale), width_px=24, height_px=16)
    assert parse_infotext(text).fields["CFG scale"] == written
    assert float(written) == scale


def test_a_text_without_pairs_is_a_prompt() -> None:
    read = parse_infotext("a fox: red, brown\nand a cactus")
    assert (read.prompt, read.fields) == ("a fox: red, brown\nand a cactus", {})


def test_control_characters_are_removed_from_the_text() -> None:
    text = write_infotext(result(prompt="a\x1b[2Jfox\r\nb\x00c"), width_px=24, height_px=16)
    assert text.startswith("a [2Jfox\nb c\nSteps")


def test_shortening_keeps_the_line_of_pairs() -> None:
    text = "a" * 100 + "\nSteps: 1, Seed: 2, Size: 3x3"
    shortened = shorten(text, 60)
    assert len(shortened.encode()) == 60
    assert shortened.endswith("…\nSteps: 1, Seed: 2, Size: 3x3")


def test_a_text_without_pairs_is_shortened_too() -> None:
    assert shorten("é" * 100, 60) == "é" * 28 + "…"
    assert len(shorten("fox\n" + "Steps: 1, Seed: 2, Size: 3x3", 20).encode()) == 20


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize(
    "prompt", ["a fox", "狐狸 🦊", "x" * 32_000, "🦊" * 32_000], ids=["short", "wide", "long", "longest"]
)
def test_every_format_stores_its_parameters(image_format: ImageFormat, prompt: str) -> None:
    text = write_infotext(result(prompt=prompt), width_px=24, height_px=16)
    stored = read_infotext(encode_image(gradient(), image_format=image_format, infotext=text))
    assert stored is not None
    assert parse_infotext(stored).fields["Seed"] == "42"
    if len(prompt) < 100:
        assert stored == text


@pytest.mark.parametrize("image_format", FORMATS)
def test_every_format_declares_that_the_image_is_generated(image_format: ImageFormat) -> None:
    data = encode_image(gradient(), image_format=image_format, infotext="a")
    assert DIGITAL_SOURCE_TYPE.encode() in data
    assert SOFTWARE.encode() in data
    image = Image.open(BytesIO(data))
    image.load()
    assert image.size == (24, 16)


def test_png_is_lossless_and_deterministic() -> None:
    data = encode_image(gradient(), infotext="a")
    assert decode_image(data) == gradient()
    assert encode_image(gradient(), infotext="a") == data


@pytest.mark.parametrize("quality", [0, 1, 50, 100])
@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
def test_every_quality_from_0_to_100_is_written(image_format: ImageFormat, quality: int) -> None:
    assert decode_image(encode_image(gradient(), image_format=image_format, quality=quality)).width_px == 24


@pytest.mark.parametrize(("name", "expected"), [("a.png", "png"), ("a.JPG", "jpeg"), ("a.webp", "webp")])
def test_a_suffix_chooses_the_format(name: str, expected: str) -> None:
    assert image_format_of(Path(name)) == expected


def test_an_unknown_suffix_is_an_error_that_lists_the_supported_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'fox\.gif'.*\.png, \.jpg"):
        image_format_of(Path("fox.gif"))


def test_resizing_fills_the_size_and_crops_the_longer_side() -> None:
    wide = Picture.from_array(np.repeat(np.arange(40, dtype=np.uint8)[None, :, None], 10, axis=0).repeat(3, axis=2))
    square = resize(wide, 20, 20)
    assert (square.width_px, square.height_px) == (20, 20)
    assert int(square.array[:, 0, 0].max()) >= 14  # the left 15 columns are cropped
    assert resize(wide, 40, 10) is wide


def test_a_resized_mask_stays_black_and_white() -> None:
    mask = Picture.from_array((np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8))
    assert set(np.unique(resize(mask, 13, 21).array)) == {0, 255}


def test_transparency_is_composited_over_white() -> None:
    file = BytesIO()
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(file, "PNG")
    assert decode_image(file.getvalue()).array.min() == 255


def test_exif_orientation_is_applied() -> None:
    file = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=exif)
    picture = decode_image(file.getvalue())
    assert (picture.width_px, picture.height_px) == (4, 8)


def test_a_mask_is_transparent_or_white_where_to_repaint() -> None:
    transparent = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    transparent.putpixel((1, 0), (0, 0, 0, 0))
    plain = Image.new("L", (2, 1))
    plain.putpixel((1, 0), 255)
    for image in (transparent, plain):
        file = BytesIO()
        image.save(file, "PNG")
        assert decode_mask(file.getvalue()).array.tolist() == [[0, 255]]


def test_16_bit_gray_is_converted_to_8_bits() -> None:
    file = BytesIO()
    Image.fromarray(np.array([[0, 0x00FF, 0x8000, 0xFFFF]], dtype=np.uint16)).save(file, "PNG")
    assert decode_image(file.getvalue()).array[0, :, 0].tolist() == [0, 0, 0x80, 0xFF]
    assert decode_mask(file.getvalue()).array.tolist() == [[0, 0, 255, 255]]


def red_profile() -> bytes:
    """Return a color profile like sRGB with the red and green primaries swapped."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes().replace(b"sRGB", b"test")
    profile = profile.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))
    return profile.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")


def test_all_color_modes_become_srgb_and_animations_their_first_frame() -> None:
    red = Image.new("RGB", (8, 4), (255, 0, 0))

    def read(image: Image.Image, kind: str, **options: Any) -> list[int]:
        file = BytesIO()
        image.save(file, kind, **options)
        return [int(level) for level in decode_image(file.getvalue()).array[0, 0]]

    assert read(red.convert("CMYK"), "JPEG", quality=100) == pytest.approx([255, 0, 0], abs=3)
    assert read(red.quantize(2), "PNG") == [255, 0, 0]
    assert read(red.convert("1"), "PNG")[0] in (0, 255)
    green = Image.new("RGB", (8, 4), (0, 255, 0))
    for kind in ("PNG", "WEBP"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        assert read(red, kind, save_all=True, append_images=[green], **lossless) == [255, 0, 0]
    assert read(red, "PNG", icc_profile=red_profile()) == pytest.approx([0, 255, 0], abs=3)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    assert read(noise, "PNG", icc_profile=srgb) == np.asarray(noise)[0, 0].tolist(), "exactly"
    assert read(red, "PNG", icc_profile=b"no profile at all") == [255, 0, 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=exif, icc_profile=red_profile())
    assert decode_image(file.getvalue()).width_px == 4, "upright with any profile"


def test_transparent_pixels_become_a_mask() -> None:
    pixels = np.full((2, 2, 4), 200, np.uint8)
    pixels[0, 0, 3] = 0
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    picture, mask = decode_with_mask(file.getvalue())
    assert mask is not None
    assert mask.array.tolist() == [[255, 0], [0, 0]]
    assert picture.array[0, 0].tolist() == [255, 255, 255]
    opaque = BytesIO()
    Image.new("RGBA", (2, 2), (1, 2, 3, 255)).save(opaque, "PNG")
    assert decode_with_mask(opaque.getvalue())[1] is None


def test_transparency_is_any_pixel_that_is_not_opaque() -> None:
    def is_transparent(image: Image.Image, kind: str = "PNG", **options: Any) -> bool:
        file = BytesIO()
        image.save(file, kind, **options)
        return has_transparency(file.getvalue())

    almost = Image.new("RGBA", (2, 2), (1, 2, 3, 255))
    assert not is_transparent(almost)
    almost.putpixel((1, 1), (1, 2, 3, 254))
    assert is_transparent(almost)
    assert is_transparent(almost.convert("LA"))
    assert is_transparent(almost, "WEBP", lossless=True)
    gray = Image.fromarray(np.array([[10, 20]], np.uint8))
    assert is_transparent(gray, transparency=20)
    assert not is_transparent(gray, transparency=30)
    assert not is_transparent(gray)
    assert not is_transparent(gray, "JPEG")
    with pytest.raises(InvalidRequest, match="IMAGE is not a PNG, JPEG or WebP file"):
        has_transparency(b"GIF89a", name="IMAGE")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "ICO", "PPM"])
def test_other_file_formats_are_refused(kind: str) -> None:
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(InvalidRequest, match="not a PNG, JPEG or WebP") as caught:
        decode_image(file.getvalue(), name="init_image")
    assert (caught.value.param, caught.value.code) == ("init_image", "invalid_image")


def test_truncated_files_are_refused_at_any_length() -> None:
    jpeg = encode_image(gradient(), image_format="jpeg")
    for data in (
        b"",
        jpeg[:3],
        jpeg[:40],
        jpeg[:-100],
        b"\x89PNG\r\n\x1a\n" + b"\x00" * 50,
        b"RIFF\x00\x00\x00\x00WEBP",
    ):
        with pytest.raises(InvalidRequest):
            decode_image(data)


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (5000, 5000)])
def test_a_huge_size_is_refused_from_the_header(width: int, height: int) -> None:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0")) + png_chunk(b"IEND", b"")
    with pytest.raises(InvalidRequest, match=r"at most 16777216 pixels are allowed") as refused:
        decode_image(data)
    assert refused.value.code == "image_too_large"


def test_a_png_with_too_many_chunks_is_refused_quickly() -> None:
    png = encode_image(gradient())
    bomb = png[:33] + png_chunk(b"tEXt", b"k\0v") * 200_000 + png[33:]
    started_s = time.thread_time()
    for read in (read_infotext, decode_image):
        with pytest.raises(InvalidRequest, match="more than 10000 chunks"):
            read(bomb)
    assert time.thread_time() - started_s < 0.5  # decoding it would take seconds


def test_a_text_chunk_that_decompresses_to_megabytes_is_refused() -> None:
    png = encode_image(gradient())
    bomb = png_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a" * 10_000_000))
    with pytest.raises(InvalidRequest, match="damaged or too large"):
        decode_image(png[:33] + bomb + png[33:])


@pytest.mark.parametrize(("size", "expected"), [((640, 320), (256, 128)), ((30, 600), (13, 256)), ((72, 64), (72, 64))])
def test_a_thumbnail_keeps_the_aspect_ratio_and_omits_the_prompt(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    array = np.zeros((size[1], size[0], 3), np.uint8)
    array[:, : size[0] // 2] = 200
    data = thumbnail(encode_image(Picture.from_array(array), infotext="a secret"), 256)
    with Image.open(BytesIO(data)) as image:
        assert (image.format, image.size) == ("WEBP", expected)
        left, right = (np.asarray(image.convert("RGB"))[:, column].mean() for column in (1, -2))
    assert (abs(left - 200) < 4, right < 4) == (True, True)
    assert read_infotext(data) is None
