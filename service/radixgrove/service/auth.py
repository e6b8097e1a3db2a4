"""API keys and the principals they stand for.

The principal decides which cached prefixes a request may use, so it comes from the authenticated
key alone, never from the request.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from radixgrove.protocol.blocks import PUBLIC_DOMAIN
from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.openai import errors
from radixgrove.protocol.settings import Sharing

LOCAL_PRINCIPAL = "local"
PUBLIC_PATHS = frozenset({"/livez", "/health", "/readyz"})  # no key is asked for
PRINCIPAL_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")
# Names that the cache uses as sharing domains of their own.
RESERVED_PRINCIPALS = frozenset({PUBLIC_DOMAIN})


class KeyFileError(InvalidInput, ValueError):
    """The key file cannot be used; the text names the line, never a key."""


class ApiKeys:
    """Which key belongs to which principal.

    Keys are kept and compared as SHA-256 digests: equal lengths, constant time, and no key in a
    memory dump or a traceback. A principal may have several keys.
    """

    def __init__(self, principals_by_key: Mapping[str, str] | None) -> None:
        """`None`: no keys configured, everyone is `local`. Empty: every request is refused."""
        self._entries: list[tuple[bytes, str]] | None = None
        if principals_by_key is not None:
            self._entries = [
                (_digest(key), principal) for key, principal in principals_by_key.items()
            ]

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Read `principal: key` lines; blank lines and `#` comments are skipped, and a byte order
        mark before them.

        Raises:
            KeyFileError: the file is unreadable, a line malformed or a key given twice.
        """
        if path is None:
            return cls(None)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise KeyFileError(
                f"the API key file {path} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise KeyFileError(f"the API key file {path} is not UTF-8") from error
        principals: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            where = f"line {number} of the API key file {path}"
            name, separator, key = line.partition(":")
            name, key = name.strip(), key.strip()
            if not separator or not key or not PRINCIPAL_PATTERN.match(name):
                raise KeyFileError(f"{where} is not 'principal: key'")
            if not (key.isascii() and key.isprintable()):
                raise KeyFileError(f"{where} has a key that headers cannot carry: use ASCII")
            if name in RESERVED_PRINCIPALS:
                raise KeyFileError(f"{where} uses a reserved principal")
            if key in principals:
                raise KeyFileError(f"{where} repeats a key")
            principals[key] = name
        return cls(principals)

    def authenticate(self, authorization: str | None) -> str:
        """The principal of an `Authorization` header.

        Raises:
            ApiError: 401, when keys are configured and the header has none of them.
        """
        if self._entries is None:
            return LOCAL_PRINCIPAL
        key = bearer_key(authorization)
        if key is None:
            raise errors.unauthorized(given=False)
        digest = _digest(key)
        found: str | None = None
        # Every entry is compared, so that the time does not tell which one matched.
        for candidate, principal in self._entries:
            if hmac.compare_digest(candidate, digest):
                found = principal
        if found is None:
            raise errors.unauthorized(given=True)
        return found


def sharing_domain(sharing: Sharing, principal: str, salt: str | None) -> str:
    """Which cached prefixes a request may use and adds to: those of its domain only.

    A salt narrows the domain, it never leads into another one: no principal has a `#` in its name.
    """
    domain = PUBLIC_DOMAIN if sharing is Sharing.SHARED else principal
    if salt is None:
        return domain
    return f"{domain}#{sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def bearer_key(authorization: str | None) -> str | None:
    """The key of an `Authorization: Bearer KEY` header; None when there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def same_secret(given: str | None, expected: str | None) -> bool:
    """Constant-time comparison; false when either side has no secret."""
    if not given or not expected:
        return False
    return hmac.compare_digest(_digest(given), _digest(expected))


def may_scrape(path: str, authorization: str | None, keys: Iterable[str | None]) -> bool:
    """Whether a request reads metrics with one of these keys: a scraper needs no API key."""
    if path != "/metrics":
        return False
    given = bearer_key(authorization)
    return any(same_secret(given, key) for key in keys)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
