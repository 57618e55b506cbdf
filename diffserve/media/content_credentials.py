"""Content credentials: manifests after C2PA, signed with the server's own certificate and put into its pictures, and
read from any. Needs the extra "c2pa". Offline: no time stamp is asked for, nothing that a manifest names is fetched.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from diffserve.api.errors import ConfigError
from diffserve.media.images import DIGITAL_SOURCE_TYPES, MEDIA_TYPES, ImageFormat
from diffserve.media.infotext import SOFTWARE
from diffserve.media.watermark import Kind
from diffserve.version import __version__

if TYPE_CHECKING:
    pass

ALGORITHMS: Final = ("es256", "es384", "es512", "ps256", "ed25519")
"""What a key may sign with; the first that fits is taken."""

INSTALL: Final = "install the extra: pip install 'diffserve[c2pa]'"
_SETTINGS: Final = {
    "verify": {"verify_after_sign": False, "remote_manifest_fetch": False, "ocsp_fetch": False},
    "builder": {"thumbnail": {"enabled": False}},
}


class ContentCredentials(msgspec.Struct, frozen=True):
    """What a manifest says. ``state`` is "valid" where nothing was changed since, "trusted" where this machine trusts
    its signer, too, else "invalid"."""

    state: str
    signer: str
    generator: str
    digital_source_type: str


class Signer:
    """Signs pictures with the chain in ``certificate`` and the private ``key``, both PEM files. Safe to share between
    threads.

    ConfigError where the extra is missing, a file cannot be read, or they do not belong together.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._chain, self._key = _read(certificate, "c2pa_certificate"), _read(key, "c2pa_key")
        try:
            import c2pa  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError(f"c2pa_certificate is given, but c2pa is not here; {INSTALL}.", param="c2pa") from None
        self._c2pa = c2pa
        self._algorithm = self._try_out(certificate)

    def sign(self, file: bytes, image_format: ImageFormat, kind: Kind) -> bytes:
        """``file`` with a manifest in it that says what made it."""
        return self._signed(file, image_format, kind, self._algorithm)

    def _signed(self, file: bytes, image_format: ImageFormat, kind: Kind, algorithm: str) -> bytes:
        info = self._c2pa.C2paSignerInfo(algorithm, self._chain, self._key, None)
        signed = BytesIO()
        with (
            self._c2pa.Context.from_dict(_SETTINGS) as context,
            self._c2pa.Signer.from_info(info) as signer,
            self._c2pa.Builder(_manifest(kind), context=context) as builder,
        ):
            builder.sign(signer, MEDIA_TYPES[image_format], BytesIO(file), signed)
        return signed.getvalue()

    def _try_out(self, certificate: str) -> str:
        """The algorithm of the key, found by signing a picture and reading it again."""
        from diffserve.api.types import Picture
        from diffserve.media.images import encode_image

        file, said = encode_image(Picture(width_px=8, height_px=8, data=bytes(192))), ""
        for algorithm in ALGORITHMS:
            try:
                found = read_credentials(self._signed(file, "png", "generated", algorithm), "png")
            except Exception as error:  # of the library's own, by the dozen
                said = said or str(error)
                continue
            if found is not None and found.state != "invalid":
                return algorithm
            said = "its signature is not valid"
        raise ConfigError(
            f"c2pa_certificate {certificate!r} and its key cannot sign a picture: {said[:200]}; give a chain of PEM "
            "certificates, the signer's own first, which may sign documents, and its private key.",
            param="c2pa_certificate",
        )


def read_credentials(file: bytes, image_format: ImageFormat) -> ContentCredentials | None:
    """The manifest in ``file``; ``None`` where there is none, or the extra is missing."""
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
                return _told(json.loads(reader.json()), str(reader.get_validation_state() or "invalid").lower())
    except Exception:  # whatever a reader says of hostile bytes, the answer is the same
        return ContentCredentials("invalid", "", "", "")


def _told(store: dict[str, Any], state: str) -> ContentCredentials:
    manifest = store.get("manifests", {}).get(store.get("active_manifest"), {})
    assertions = [one for one in manifest.get("assertions", ()) if str(one.get("label", "")).startswith("c2pa.actions")]
    actions = [action for one in assertions for action in one.get("data", {}).get("actions", ())]
    sources = [str(action["digitalSourceType"]) for action in actions if action.get("digitalSourceType")]
    makers = [str(one.get("name", "")) for one in manifest.get("claim_generator_info") or ()]
    signer = manifest.get("signature_info") or {}
    name = signer.get("common_name") or signer.get("issuer") or ""
    return ContentCredentials(state, str(name)[:200], (makers or [""])[0][:200], (sources or [""])[0][:200])


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


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error.strerror}.", param=name) from None
