"""Reads of an API server without a program: tests look thousands of times, each start costs."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

_TIMEOUT = 30.0  # seconds
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


class Unanswered(Exception):
    """The question is none for `Api`, or its answer an error: kubectl is to be asked."""


@dataclass(frozen=True)
class _Resource:
    prefix: str  # "/api/v1", "/apis/apps/v1"
    plural: str
    namespaced: bool


@dataclass(frozen=True)
class _Question:
    """The arguments of a `kubectl get`."""

    kinds: list[str]
    name: str = ""
    namespace: str | None = "default"  # None: all of them
    selector: str = ""
    subresource: str = ""

    @classmethod
    def of(cls, arguments: tuple[str, ...]) -> _Question:
        words: list[str] = []
        options: dict[str, Any] = {}
        rest = iter(arguments)
        for argument in rest:
            flag, _, value = argument.partition("=")
            match flag:
                case "-n":
                    options["namespace"] = next(rest)
                case "--all-namespaces":
                    options["namespace"] = None
                case "-l" | "--selector" if value:
                    options["selector"] = value
                case "--subresource":
                    options["subresource"] = value
                case _ if argument.startswith("-") or "/" in argument:
                    raise Unanswered(argument)
                case _:
                    words.append(argument)
        kinds, *names = words
        if len(names) > 1 or (names and "," in kinds):
            raise Unanswered(" ".join(words))
        return cls(kinds.split(","), *names, **options)


class Api:
    """One API server and the bearer of a token, over a connection that is kept."""

    def __init__(self, host: str, port: int, authority: Path, token: str) -> None:
        context = ssl.create_default_context(cafile=str(authority))
        self._connection = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT, context=context
        )
        self._token = token
        self._turn = threading.Lock()
        self._resources: dict[str, _Resource] = {}

    def close(self) -> None:
        self._connection.close()

    def read(self, *arguments: str) -> Any | None:
        """What `kubectl get` with these arguments prints as JSON; None for a name there is not.

        Raises `Unanswered` for everything that only kubectl can do, or say.
        """
        question = _Question.of(arguments)
        resources = [self._resource(kind) for kind in question.kinds]
        if question.name:
            return _shown(self._get(_path(resources[0], question)))
        items: list[Any] = []
        for resource in resources:
            found = self._get(_path(resource, question))
            if found is None:
                raise Unanswered(f"no {resource.plural} are served")
            # A list says once what its items are.
            kind, version = found["kind"].removesuffix("List"), found["apiVersion"]
            shown = map(_shown, found["items"])
            items += ({"apiVersion": version, "kind": kind, **item} for item in shown)
        return {"apiVersion": "v1", "kind": "List", "items": items}

    def _resource(self, kind: str) -> _Resource:
        if kind not in self._resources:  # or not yet
            self._resources = {}
            for name, resource in self._discover():
                self._resources.setdefault(name, resource)
        if kind not in self._resources:
            raise Unanswered(f"no resource is called {kind}")
        return self._resources[kind]

    def _discover(self) -> Iterator[tuple[str, _Resource]]:
        """Every name of every resource, the preferred ones first (`kubectl api-resources`)."""
        for root in ("/api", "/apis"):
            for group in (self._get(root, accept=_DISCOVERY) or {"items": []})["items"]:
                name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    prefix = f"{root}/{name}/{version['version']}".replace("//", "/")
                    for found in version.get("resources", []):
                        plural = found["resource"]
                        resource = _Resource(prefix, plural, found["scope"] == "Namespaced")
                        short = found.get("shortNames", [])
                        names = [plural, found["singularResource"], f"{plural}.{name}", *short]
                        yield from ((one, resource) for one in names)

    def _get(self, path: str, *, accept: str = "application/json") -> Any | None:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
        with self._turn:
            try:
                self._connection.request("GET", path, headers=headers)
                response = self._connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # the next request opens it again
                raise Unanswered(str(error)) from error
        if response.status == 200:
            return json.loads(body)
        if response.status == 404 and b'"reason":"NotFound"' in body and b'"details"' in body:
            return None
        raise Unanswered(f"{response.status}: {body[:200]!r}")


def _shown(found: Any) -> Any:
    """Without what kubectl leaves out too."""
    if found is not None:
        found["metadata"].pop("managedFields", None)
    return found


def _path(resource: _Resource, question: _Question) -> str:
    scope = ""
    if resource.namespaced and question.namespace is not None:
        scope = f"/namespaces/{question.namespace}"
    path = f"{resource.prefix}{scope}/{resource.plural}"
    if question.name:
        path += f"/{question.name}"
    if question.subresource:
        path += f"/{question.subresource}"
    return f"{path}?labelSelector={quote(question.selector)}" if question.selector else path
