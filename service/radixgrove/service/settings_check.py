"""What router and worker know to be wrong of their settings before any process starts."""

from __future__ import annotations

from radixgrove.protocol.settings import RouterSettings, WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.service.auth import ApiKeys, KeyFileError
from radixgrove.service.listening import check_management
from radixgrove.service.redis_rules import RedisAddress


class UnusableSettings(exit_codes.CodedStartFailed):
    """A setting leads to nothing that can be used; the text says which and what is wrong."""

    code = exit_codes.USAGE


def check_settings(settings: WorkerSettings | RouterSettings) -> None:
    """Refuse what would otherwise show after minutes of loading, or in a part's trace.

    Raises:
        UnusableSettings: keys that cannot be read, or a malformed URL of Redis.
        BindingError: see `check_management`.
    """
    check_management(settings)
    try:
        ApiKeys.load(settings.api_keys_file)
    except KeyFileError as error:
        raise UnusableSettings(str(error)) from error
    try:
        RedisAddress(settings.redis_url or "redis://")
    except ValueError as error:
        raise UnusableSettings(f"redis_url is {error}") from error
