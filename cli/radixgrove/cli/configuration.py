"""Settings from flags, environment and a YAML file: one definition, one precedence.

flag > `RADIXGROVE_*` variable > file > default. A file holds keys of a part in a section of its
name (`worker:`, `router:`, `up:`) and, at the top level, keys that every part having them adopts;
a section wins over the top level. Unknown keys and variables are refused, naming the nearest known
one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from radixgrove.cli.parts import UpSettings
from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.settings import FORMS, RouterSettings, WorkerSettings

PREFIX = "RADIXGROVE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
API_KEY_VARIABLE = PREFIX + "API_KEY"
# Read by the commands that talk to a running cluster; no settings of a part.
CLIENT_VARIABLES = frozenset({API_KEY_VARIABLE, PREFIX + "URL", PREFIX + "MANAGEMENT_URL"})
# Read by kernels and ranks where they are needed, in programs without settings too.
ENGINE_VARIABLES = frozenset({PREFIX + name for name in ("CACHE_DIR", "PDL", "PEER_ALL_REDUCE")})
PARTS: dict[str, type[BaseModel]] = {
    "worker": WorkerSettings,
    "router": RouterSettings,
    "up": UpSettings,
}
_MAX_FILE_BYTES = 1 << 20
# In place of pydantic's words, which say how it reads a text.
_EXPECTED = {
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
_MERGE = "tag:yaml.org,2002:merge"
_SERVICE_LINK = re.compile(
    r"(.+?)_(SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_.+)?)?)"
)

S = TypeVar("S", bound=BaseModel)


class ConfigurationError(InvalidInput):
    """A setting is unknown or wrong; the text says where it came from and what would be right."""


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Settings of one part, and where each value came from."""

    settings: S
    sources: dict[str, str]  # field -> "flag --x", "RADIXGROVE_X", "FILE", "default"


@dataclass(frozen=True)
class ConfigFile:
    """A parsed file; all its keys are known."""

    name: str
    common: dict[str, Any]
    sections: dict[str, dict[str, Any]]

    def values(self, part: str) -> dict[str, tuple[Any, str]]:
        """Field -> (value, source) for one part, the section over the top level."""
        known = PARTS[part].model_fields
        found = {k: (v, self.name) for k, v in self.common.items() if k in known}
        section = self.sections.get(part, {})
        return found | {k: (v, f"{self.name} ({part})") for k, v in section.items()}


EMPTY_FILE = ConfigFile("", {}, {})


def load_file(path: str | None) -> ConfigFile:
    """
    Raises:
        ConfigurationError: the file is unreadable, no mapping, or has an unknown key.
    """
    if path is None:
        return EMPTY_FILE
    try:
        if Path(path).stat().st_size > _MAX_FILE_BYTES:
            raise ConfigurationError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
        content = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return ConfigFile(path, {}, {})
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must be a mapping of settings")
    anywhere = {name for model in PARTS.values() for name in model.model_fields}
    common: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        if key in PARTS:
            sections[key] = _section(path, key, value)
        elif key in anywhere:
            common[key] = value
        else:
            raise ConfigurationError(f"{path}: {_unknown('key', key, {*anywhere, *PARTS})}")
    return ConfigFile(path, common, sections)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML's own would drop the first in silence."""

    def get_single_node(self) -> yaml.Node | None:
        """As they were written: constructing a mapping puts those that it merges into its keys."""
        root = super().get_single_node()
        _check_keys(root)
        return root


def _check_keys(root: yaml.Node | None) -> None:
    """
    Raises:
        yaml.YAMLError: a mapping has a key twice.
    """
    nodes, known = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))  # an anchor may be within itself
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    where = f"line {key.start_mark.line + 1}"
                    raise yaml.YAMLError(f"the key '{key.value}' is given twice ({where})")
                seen.add(key.value)
            nodes += [key, value]


def _section(path: str, part: str, content: Any) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: section '{part}' must be a mapping of settings")
    for key in content:
        if key not in PARTS[part].model_fields:
            text = _unknown("key", key, PARTS[part].model_fields)
            raise ConfigurationError(f"{path}: section '{part}': {text}")
    return dict(content)


def _unknown(kind: str, name: object, known: Iterable[str], prefix: str = "") -> str:
    """
    Args:
        prefix: of `name` and all known ones: it would make any two of them alike.
    """
    own = str(name).removeprefix(prefix)
    near = difflib.get_close_matches(own, [each.removeprefix(prefix) for each in known], n=1)
    return f"unknown {kind} '{name}'" + (f"; did you mean '{prefix}{near[0]}'?" if near else "")


def load_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Field -> text of every `RADIXGROVE_*` variable; an empty one counts as unset.

    Raises:
        ConfigurationError: a variable names no setting of any part.
    """
    known = {PREFIX + name.upper() for model in PARTS.values() for name in model.model_fields}
    others = CLIENT_VARIABLES | ENGINE_VARIABLES | {CONFIG_VARIABLE}
    found: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or _is_service_link(name, environ):
            continue
        if name in others:
            continue
        if name not in known:
            text = _unknown("environment variable", name, known | others, PREFIX)
            raise ConfigurationError(text)
        if value:
            found[name.removeprefix(PREFIX).lower()] = value
    return found


def _is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes set it: a Service named radixgrove* puts such variables into every pod."""
    match = _SERVICE_LINK.fullmatch(name)
    if match is None or f"{match[1]}_SERVICE_HOST" not in environ:
        return False
    return match[2] != "PORT" or "://" in environ[name]


def resolve(
    part: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: ConfigFile,
) -> Resolved[Any]:
    """The settings of one part.

    Args:
        flags: values given on the command line; absent or None means not given.
        environment: from `load_environment`; names of other parts are skipped.

    Raises:
        ConfigurationError: a value is wrong; the text names its source.
    """
    model = PARTS[part]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(model.model_fields, "default")
    for name, (value, source) in file.values(part).items():
        values[name], sources[name] = value, source
    for name, value in environment.items():
        if name in model.model_fields:
            field = model.model_fields[name]
            values[name] = split_list(value) if is_list(field) else value
            sources[name] = PREFIX + name.upper()
    for name, value in flags.items():
        if value is not None and name in model.model_fields:
            values[name], sources[name] = value, flag_of(name)
    try:
        return Resolved(model.model_validate(values), sources)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, model, sources)) from None


def _explain(error: ValidationError, model: type[BaseModel], sources: Mapping[str, str]) -> str:
    """Every wrong value: its name, its source and what would be right.

    Values of flags are shown, which every user of the machine sees anyway. In a variable or a file
    a secret may stand at the wrong place.
    """
    lines = []
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else "settings"
        source = sources.get(name, "settings")
        text = _EXPECTED.get(detail["type"]) or detail["msg"]
        if detail["type"] == "string_pattern_mismatch":
            text = FORMS.get(detail["ctx"]["pattern"], text)
        if source == flag_of(name):
            given = str(detail["input"])
            source += f" {redact(given)}"
            if is_list(model.model_fields[name]) and "," in given:
                text += f"; one value each, as in {flag_of(name)} A {flag_of(name)} B"
        lines.append(f"{name} (from {source}): {text}")
    return "; ".join(lines)


def secret_hint(flag: str) -> str:
    """Where a secret is given instead of by a flag of its name; empty for other names."""
    fields = {name: field for model in PARTS.values() for name, field in model.model_fields.items()}
    secrets = {PREFIX + name.upper() for name, field in fields.items() if is_secret(field)}
    variable = PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    if variable not in secrets | {API_KEY_VARIABLE}:
        return ""
    return f" Secrets have no flag, since all users of a machine see those: set {variable}."


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def is_secret(field: FieldInfo) -> bool:
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def split_list(text: str) -> list[str]:
    """`a, b` as a list: how environment variables give one."""
    return [item.strip() for item in text.split(",") if item.strip()]


def show(value: Any) -> str:
    """A value for people, as it would stand in the file; secrets as stars."""
    if isinstance(value, SecretStr):
        return "********"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return redact(str(value))


def redact(text: str) -> str:
    """URLs without the user and password they may carry."""
    return re.sub(r"://[^/@\s]*@", "://********@", text)
