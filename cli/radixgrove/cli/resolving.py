"""From a command's parsed flags to settings, with errors as click shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from radixgrove.cli.configuration import (
    CONFIG_VARIABLE,
    ConfigFile,
    ConfigurationError,
    Resolved,
    load_environment,
    load_file,
    resolve,
)
from radixgrove.cli.parts import AMBIGUOUS, WORKER_ADDRESS
from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.settings import RouterSettings, WorkerSettings
from radixgrove.service import exit_codes

# What other programs call it; a cluster of one's own takes it where nothing else names a Redis.
REDIS_VARIABLE = "REDIS_URL"


class ConfigurationUsage(InvalidInput, click.ClickException):
    """A wrong setting: exit code 2, without the usage lines that would hide the reason."""

    exit_code = exit_codes.USAGE

    def __init__(self, error: ConfigurationError) -> None:
        super().__init__(str(error))


def read(config: str | None) -> tuple[ConfigFile, dict[str, str]]:
    """The file and the environment.

    Raises:
        ConfigurationUsage: one of them holds something unknown.
    """
    try:
        path = config or os.environ.get(CONFIG_VARIABLE) or None
        return load_file(path), load_environment(os.environ)
    except ConfigurationError as error:
        raise ConfigurationUsage(error) from None


def resolve_part(part: str, config: str | None, flags: Mapping[str, Any]) -> Resolved[Any]:
    """Settings of `worker` or `router` for a command that runs this one part."""
    file, environment = read(config)
    try:
        return resolve(part, flags, environment, file)
    except ConfigurationError as error:
        raise ConfigurationUsage(error) from None


class UpParts:
    """Settings of `radixgrove up`: its own, the router's, and what all workers have in common."""

    def __init__(self, config: str | None, flags: Mapping[str, Any]) -> None:
        file, environment = read(config)
        for name in AMBIGUOUS & environment.keys():
            raise ConfigurationUsage(
                ConfigurationError(
                    f"{name} means different things to router and worker: under `up`, set it in "
                    "the file's `router:` or `worker:` section"
                )
            )
        for name in AMBIGUOUS & file.common.keys():
            raise ConfigurationUsage(
                ConfigurationError(
                    f"{file.name}: under `up`, {name} belongs in a section, `router:` or `worker:`"
                )
            )
        # `replicas` is `up`'s number here, the router's list of URLs elsewhere.
        own = {"replicas"}
        try:
            self.up = resolve("up", flags, environment, file)
            self.router: Resolved[RouterSettings] = resolve(
                "router", _less(flags, own), _less(environment, own), _less_common(file, own)
            )
            self.worker: Resolved[WorkerSettings] = resolve(
                "worker",
                _less(flags, WORKER_ADDRESS),
                _less(environment, WORKER_ADDRESS),
                _less_of_workers(file),
            )
        except ConfigurationError as error:
            raise ConfigurationUsage(error) from None
        url = os.environ.get(REDIS_VARIABLE)
        if url and not (self.router.settings.redis_url or self.worker.settings.redis_url):
            self.router = _with_redis(self.router, url)
            self.worker = _with_redis(self.worker, url)


def _with_redis(part: Resolved[Any], url: str) -> Resolved[Any]:
    settings = part.settings.model_copy(update={"redis_url": url})
    return Resolved(settings, part.sources | {"redis_url": REDIS_VARIABLE})


def _less(values: Mapping[str, Any], names: set[str] | frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _less_common(file: ConfigFile, names: set[str] | frozenset[str]) -> ConfigFile:
    return ConfigFile(file.name, _less(file.common, names), file.sections)


def _less_of_workers(file: ConfigFile) -> ConfigFile:
    """Without addresses, which `up` chooses for its workers."""
    sections = {
        part: _less(values, WORKER_ADDRESS) if part == "worker" else values
        for part, values in file.sections.items()
    }
    return ConfigFile(file.name, _less(file.common, WORKER_ADDRESS), sections)
