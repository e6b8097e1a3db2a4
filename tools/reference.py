"""`python -m tools.reference`: tables of the docs, from the code.

The settings in configuration.md, and what api.md says is refused or ignored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from radixgrove.cli.configuration import PARTS, flag_of, is_secret, show
from radixgrove.protocol.endpoints import ENDPOINTS
from radixgrove.protocol.openai.bodies import (
    IGNORED,
    MESSAGE_UNSUPPORTED,
    PART_TYPES,
    STRUCTURED_NEUTRAL,
)
from radixgrove.protocol.settings import Settings

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
DOCS = Path(__file__).parents[1] / "docs"


def settings() -> str:
    """Markdown: what worker and router share, then what each part has on its own."""
    common = Settings.model_fields
    sections = [("Worker and router", common)]
    for part, model in PARTS.items():
        own = {k: v for k, v in model.model_fields.items() if k not in common}
        sections.append((f"`{part}`", own))
    return "\n".join(_table(title, fields) for title, fields in sections)


def _table(title: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"### {title}", "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        default = "" if field.default is None else f"`{show(field.default)}`"
        note = " Secret: no flag." if is_secret(field) else _values(field)
        text = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {text}{note} |")
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    """Those of a setting that has one of a few."""
    kind = field.annotation
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return ""
    return f" Values: {', '.join(f'`{member.value}`' for member in kind)}."


def fields() -> str:
    """Markdown: fields that are refused, where, and unless which value; and what is ignored."""
    lines = ["| refused | by | unless it is |", "|---|---|---|"]
    names = sorted({name for endpoint in ENDPOINTS for name in endpoint.neutral})
    for name in names:
        having = [endpoint for endpoint in ENDPOINTS if name in endpoint.neutral]
        where = "both" if len(having) == len(ENDPOINTS) else having[0].name
        lines.append(_refused(name, where, having[0].neutral[name]))
    for name, values in STRUCTURED_NEUTRAL.items():
        lines.append(_refused(f"structured_outputs.{name}", "both", values))
    return "\n".join([*lines, "", *_refused_elsewhere(), "", *_ignored()]) + "\n"


def _refused(name: str, where: str, neutral: tuple[Any, ...]) -> str:
    values = ", ".join(f"`{value}`" for value in ("null", *map(json.dumps, neutral)))
    return f"| `{name}` | {where} | {values} |"


def _refused_elsewhere() -> list[str]:
    fields = ", ".join(f"`{name}`" for name in MESSAGE_UNSUPPORTED)
    parts = " or ".join(f"`{name}`" for name in PART_TYPES)
    return [
        "Refused too: in messages "
        f"{fields}, unless null, and parts of the content of another `type` than {parts}; fields "
        "that `response_format`, its `json_schema`, `structured_outputs` or `structural_tag` do "
        "not have."
    ]


def _ignored() -> list[str]:
    return [
        "Ignored are all other fields, among them:",
        "",
        "| ignored |",
        "|---|",
        *(f"| `{name}` |" for name in IGNORED),
    ]


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "configuration.md": settings,
    DOCS / "api.md": fields,
}


def updated(page: Path) -> str:
    """The page with fresh tables between its markers."""
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{PAGES[page]()}\n{END}{tail}"


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    for page in PAGES:
        page.write_text(updated(page))
        print(f"wrote {page.name}; flags look like {flag_of('max_running')}")


if __name__ == "__main__":
    main()
