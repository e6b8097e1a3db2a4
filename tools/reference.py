"""`python -m tools.reference`: the tables of docs/configuration.md, from the settings."""

from __future__ import annotations

from pathlib import Path

from pydantic.fields import FieldInfo

from radixgrove.cli.configuration import PARTS, flag_of, is_secret, show
from radixgrove.protocol.settings import Settings

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def tables() -> str:
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
        note = " Secret: no flag." if is_secret(field) else ""
        text = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {text}{note} |")
    return "\n".join(lines) + "\n"


def updated(document: str) -> str:
    """The document with fresh tables between its markers."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
    print(f"wrote {DOCUMENT.name}; flags look like {flag_of('max_running')}")
