"""Content credentials: C2PA manifests, signed with the certificate of the server and embedded in image files.

Signing and reading need the extra "c2pa". Both work offline: no time stamp is requested, and no URL in a manifest is
fetched.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import ConfigError
from diffserve.api.types import Picture
from diffserve.media.images import DIGITAL_SOURCE_TYPES, MEDIA_TYPES, ImageFormat, encode_image
from diffserve.media.infotext import SOFTWARE
from diffserve.media.watermark import Kind
from diffserve.version import __version__

ALGORITHMS: Final = ("es256", "es384", "es512", "ps256", "ed25519")
"""Signing algorithms in the order in which they are tried; the first that works with the key is used."""

INSTALL: Final = "install the extra: pip install 'diffserve[c2pa]'"
_SETTINGS: Final = {
    "verify": {"verify_after_sign": False, "remote_manifest_fetch": False, "ocsp_fetch": False},
    "builder": {"thumbnail": {"enabled": False}},
}


class ContentCredentials(msgspec.Struct, frozen=True):
    """Content of the C2PA manifest of an image file.

    Attributes:
        state: "valid" if the file is unchanged since signing, "trusted" if this machine also trusts the signer,
            otherwise "invalid".
        signer: Common name or issuer of the certificate.
        generator: Name of the software that made the claim.
        digital_source_type: IPTC digital source type.
    """

    state: str
    signer: str
    generator: str
    digital_source_type: str


class Signer:
    """Signer of image files with an X.509 certificate chain. Instances can be shared between threads."""

    def __init__(self, certificate: str, key: str) -> None:
        """Load the certificate chain and the key, and sign a test image.

        Args:
            certificate: Path of the certificate chain, a PEM file.
            key: Path of the private key, a PEM file.

        Raises:
            ConfigError: The extra "c2pa" is missing, a file cannot be read, or key and certificate do not match.
        """
        self._chain, self._key = _read_file(certificate, "c2pa_certificate"), _read_file(key, "c2pa_key")
        try:
            import c2pa  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError(
                f"c2pa_certificate is given, but the package c2pa is not installed; {INSTALL}.", param="c2pa"
            ) from None
        self._c2pa = c2pa
        self._algorithm = self._find_algorithm(certificate)

    def sign(self, file: bytes, image_format: ImageFormat, kind: Kind) -> bytes:
        """Return ``file`` with a signed manifest that states its digital source type."""
        return self._sign_with(file, image_format, kind, self._algorithm)

    def _sign_with(self, file: bytes, image_format: ImageFormat, kind: Kind, algorithm: str) -> bytes:
        info = self._c2pa.C2paSignerInfo(algorithm, self._chain, self._key, None)
        signed = BytesIO()
        with (
            self._c2pa.Context.from_dict(_SETTINGS) as context,
            self._c2pa.Signer.from_info(info) as signer,
            self._c2pa.Builder(_manifest(kind), context=context) as builder,
        ):
            builder.sign(signer, MEDIA_TYPES[image_format], BytesIO(file), signed)
        return signed.getvalue()

    def _find_algorithm(self, certificate: str) -> str:
        """Return the algorithm that fits the key, by signing a test image and verifying it."""
        file, problem = encode_image(Picture(width_px=8, height_px=8, data=bytes(192))), ""
        for algorithm in ALGORITHMS:
            try:
                credentials = read_credentials(self._sign_with(file, "png", "generated", algorithm), "png")
            except Exception as error:  # the library raises many types of its own
                problem = problem or str(error)
                continue
            if credentials is not None and credentials.state != "invalid":
                return algorithm
            problem = "its signature is not valid"
        raise ConfigError(
            f"c2pa_certificate {certificate!r} and its key cannot sign an image: {problem[:200]}; give a chain of PEM "
            "certificates, the signer's own first, which may sign documents, and its private key.",
            param="c2pa_certificate",
        )


def read_credentials(file: bytes, image_format: ImageFormat) -> ContentCredentials | None:
    """Read the manifest in ``file``; ``None`` if there is none or the extra "c2pa" is not installed."""
    try:
        import c2pa
    except ImportError:
        return None
    try:
        with c2pa.Context.from_dict(_SETTINGS) as context:
            reader = c2pa.Reader.try_create(MEDIA_TYPES[image_format], BytesIO(file), context=context)
            if reader is None:
                return None
            with reader:
                state = str(reader.get_validation_state() or "invalid").lower()
                return _credentials_of(json.loads(reader.json()), state)
    except Exception:  # malformed files raise errors of many types
        return ContentCredentials("invalid", "", "", "")


def _credentials_of(store: dict[str, Any], state: str) -> ContentCredentials:
    manifest = store.get("manifests", {}).get(store.get("active_manifest"), {})
    assertions = manifest.get("assertions", ())
    action_lists = [entry for entry in assertions if str(entry.get("label", "")).startswith("c2pa.actions")]
    actions = [action for entry in action_lists for action in entry.get("data", {}).get("actions", ())]
    sources = [str(action["digitalSourceType"]) for action in actions if action.get("digitalSourceType")]
    generators = [str(info.get("name", "")) for info in manifest.get("claim_generator_info") or ()]
    signer = manifest.get("signature_info") or {}
    name = signer.get("common_name") or signer.get("issuer") or ""
    return ContentCredentials(state, str(name)[:200], (generators or [""])[0][:200], (sources or [""])[0][:200])


def _manifest(kind: Kind) -> dict[str, Any]:
    action = {
        "action": "c2pa.created",
        "softwareAgent": {"name": "diffserve", "version": __version__},
        "digitalSourceType": DIGITAL_SOURCE_TYPES[kind],
    }
    return {
        "claim_generator_info": [{"name": "diffserve", "version": __version__}],
        "title": SOFTWARE,
        "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [action]}}],
    }


def _read_file(path: str, name: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error.strerror}.", param=name) from None
