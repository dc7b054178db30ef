"""Certificates of a private authority, as people make them for their own servers."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    name: x509.Name
    key: ec.EllipticCurvePrivateKey


def authority(path: Path) -> Authority:
    """A new one, with its certificate at that path."""
    made = Authority(_named(path.stem), ec.generate_private_key(ec.SECP256R1()))
    built = _certificate(made, made.name, made.key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    signed = built.add_extension(usage, critical=True).sign(made.key, hashes.SHA256())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return made


def issued(by: Authority, path: Path, address: str) -> Path:
    """A certificate for a server at that address, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    built = _certificate(by, _named(address), key.public_key()).add_extension(names, critical=False)
    signed = built.sign(by.key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + private)
    return path


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _certificate(
    by: Authority, subject: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(by.name)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
