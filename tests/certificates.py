"""Certificates made for a test: a root of its own, and one that it signs, with its key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


class Chain(NamedTuple):
    """PEM files: the signer's certificate with the root's behind it, its private key, and the root's alone."""

    chain: Path
    key: Path
    root: Path


def make_chain(folder: Path, name: str, *, host: bool = False) -> Chain:
    """Write a certificate for ``name``, which is a ``host`` or a signer of documents."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _certificate("a root of tests", root_key.public_key(), root_key, is_root=True)
    usage = ExtendedKeyUsageOID.SERVER_AUTH if host else ExtendedKeyUsageOID.EMAIL_PROTECTION
    leaf = _certificate(name, key.public_key(), root_key, usage=usage, host=name if host else "")
    files = Chain(folder / "chain.pem", folder / "key.pem", folder / "root.pem")
    pem = [certificate.public_bytes(serialization.Encoding.PEM) for certificate in (leaf, root)]
    files.chain.write_bytes(b"".join(pem))
    files.root.write_bytes(pem[1])
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def _certificate(
    name: str,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_root: bool = False,
    usage: x509.ObjectIdentifier | None = None,
    host: str = "",
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    bits = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(_x509_name(name))
        .issuer_name(_x509_name("a root of tests"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + 30 * DAY)
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=is_root, crl_sign=is_root, **bits), critical=True
        )
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if host:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _x509_name(name: str) -> x509.Name:
    both = (NameOID.COMMON_NAME, name), (NameOID.ORGANIZATION_NAME, "diffserve tests")
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in both])
