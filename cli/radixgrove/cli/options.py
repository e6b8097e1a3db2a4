"""Command-line flags generated from the settings models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from radixgrove.cli.configuration import CONFIG_VARIABLE, PARTS, flag_of, is_list, is_secret, show


def setting_options(*parts: str, without: Iterable[str] = ()) -> list[click.Parameter]:
    """One flag a field of the named parts, in their order, and `--config`; secrets get none."""
    fields: dict[str, FieldInfo] = {}
    for part in parts:
        for name, field in PARTS[part].model_fields.items():
            if name not in without and not is_secret(field):
                fields.setdefault(name, field)
    config = click.Option(
        ["--config"],
        metavar="FILE",
        help=f"YAML file of settings; also {CONFIG_VARIABLE}. Flags and variables win over it.",
    )
    everyday = [_option(name, field) for name, field in fields.items() if _is_everyday(field)]
    rest = [_option(name, field) for name, field in fields.items() if not _is_everyday(field)]
    return [config, *everyday, *rest]


class SettingsCommand(click.Command):
    """A command: its `--help` shows everyday settings only, and `--help-all` all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every setting and exit.",
            )
        )


def _show_all(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    for parameter in context.command.params:
        if isinstance(parameter, click.Option):
            parameter.hidden = False
    click.echo(context.get_help())
    context.exit()


def _is_everyday(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, Mapping) and bool(extra.get("everyday"))


def _option(name: str, field: FieldInfo) -> click.Option:
    flag = flag_of(name)
    kind = _plain_type(field.annotation)
    text = field.description or ""
    if field.default is not None and field.default != []:
        text += f"  [default: {show(field.default)}]"
    shared: dict[str, Any] = {"help": text, "hidden": not _is_everyday(field), "default": None}
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], **shared)
    if is_list(field):
        return _ListOption([flag], multiple=True, metavar="TEXT", **shared)
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [str(member.value) for member in kind]
        return click.Option([flag], type=click.Choice(choices), **shared)
    # Bounds and types are the model's business: one definition, one error text.
    metavar = {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")
    return click.Option([flag], type=str, metavar=metavar, **shared)


class _ListOption(click.Option):
    """A repeatable flag that is None, not empty, when it was not given."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        given = super().type_cast_value(ctx, value)
        return list(given) if given else None


def _plain_type(annotation: Any) -> Any:
    """`int` of `int | None`."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _plain_type(kinds[0])
    return annotation
