"""Device identities: an Ed25519 key pair whose owner signs the challenge of a connection.

A device identifies a client but grants nothing; scopes come from the record of the secret. An invalid signature is
rejected even if the secret is right, because the client is impersonating a device.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from antiphon.errors import Unauthorized
from antiphon.gateway.ws.frames import Params

MAX_CLOCK_SKEW_MS = 120_000  # between a device's clock and ours
DEVICE_IDENTITY_HINT = "Create a new device identity, or connect without one."


class Device(Params, frozen=True):
    id: str
    public_key: str
    signature: str
    signed_at: int
    nonce: str | None = None


def verify_device(
    device: Device,
    *,
    nonce: str,
    now: int,
    client_id: str,
    client_mode: str,
    role: str,
    scopes: list[str],
    token: str,
    platform: str,
    family: str,
    local: bool,
) -> None:
    """Return if the device signed exactly this challenge and these claims; raise otherwise.

    The oldest form does not sign the challenge and could be replayed, so it is accepted from this machine only.
    """
    key = _decode_base64url(device.public_key, 32, "PUBLIC_KEY_INVALID", "public key")
    if hashlib.sha256(key).hexdigest() != device.id:
        raise _build_refusal("DEVICE_ID_MISMATCH", "The device id is not the digest of its key.")
    if abs(now - device.signed_at) > MAX_CLOCK_SKEW_MS:
        raise _build_refusal("SIGNATURE_EXPIRED", "The device's signature is too old, or its clock is wrong.")
    if device.nonce is None and not local:
        raise _build_refusal("NONCE_REQUIRED", "The device did not sign the challenge.")
    if device.nonce not in (None, nonce):
        raise _build_refusal("NONCE_MISMATCH", "The device signed another challenge.")
    claims = [device.id, client_id, client_mode, role, ",".join(scopes), str(device.signed_at), token]
    forms = (
        [["v1", *claims]]
        if device.nonce is None
        else [["v2", *claims, nonce], ["v3", *claims, nonce, platform.lower(), family.lower()]]
    )
    signature = _decode_base64url(device.signature, 64, "SIGNATURE_INVALID", "signature")
    if not any(_is_signed_by(key, signature, "|".join(form).encode()) for form in forms):
        raise _build_refusal("SIGNATURE_INVALID", "The device's signature is invalid.")


def _is_signed_by(key: bytes, signature: bytes, claims: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - most clients bring no device
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, claims)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decode_base64url(text: str, size: int, code: str, what: str) -> bytes:
    try:
        value = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        value = b""
    if len(value) != size:
        raise _build_refusal(code, f"The device's {what} is not {size} bytes in base64url.")
    return value


def _build_refusal(code: str, what: str) -> Unauthorized:
    return Unauthorized(what, DEVICE_IDENTITY_HINT, code=f"DEVICE_AUTH_{code}")
