"""Device identities: an Ed25519 key pair whose owner signs the challenge of a connection.

A device says who connects, not what they may do: that is the secret's record. A signature that does not fit is
refused even when the secret is right, because somebody is pretending.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from antiphon.errors import Unauthorized
from antiphon.gateway.frames import Params

SKEW = 120_000  # ms between a device's clock and ours
MORE = "Make a new device identity, or connect without one."


class Device(Params, frozen=True):
    id: str
    public_key: str
    signature: str
    signed_at: int
    nonce: str | None = None


def verify(
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
    """Return if the device signed this very challenge with these very claims.

    The oldest form signs no challenge and could be repeated by whoever saw it, so it is for this machine only.
    """
    key = _bytes(device.public_key, 32, "PUBLIC_KEY_INVALID", "public key")
    if hashlib.sha256(key).hexdigest() != device.id:
        raise _refused("DEVICE_ID_MISMATCH", "The device id is not the digest of its key.")
    if abs(now - device.signed_at) > SKEW:
        raise _refused("SIGNATURE_EXPIRED", "The device's signature is too old, or its clock is wrong.")
    if device.nonce is None and not local:
        raise _refused("NONCE_REQUIRED", "The device did not sign the challenge.")
    if device.nonce not in (None, nonce):
        raise _refused("NONCE_MISMATCH", "The device signed another challenge.")
    claims = [device.id, client_id, client_mode, role, ",".join(scopes), str(device.signed_at), token]
    forms = (
        [["v1", *claims]]
        if device.nonce is None
        else [["v2", *claims, nonce], ["v3", *claims, nonce, platform.lower(), family.lower()]]
    )
    signature = _bytes(device.signature, 64, "SIGNATURE_INVALID", "signature")
    if not any(_signed(key, signature, "|".join(form).encode()) for form in forms):
        raise _refused("SIGNATURE_INVALID", "The device's signature does not fit.")


def _signed(key: bytes, signature: bytes, claims: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - most clients bring no device
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, claims)
    except (InvalidSignature, ValueError):
        return False
    return True


def _bytes(text: str, size: int, code: str, what: str) -> bytes:
    try:
        value = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        value = b""
    if len(value) != size:
        raise _refused(code, f"The device's {what} is not {size} bytes in base64url.")
    return value


def _refused(code: str, what: str) -> Unauthorized:
    return Unauthorized(what, MORE, code=f"DEVICE_AUTH_{code}")
