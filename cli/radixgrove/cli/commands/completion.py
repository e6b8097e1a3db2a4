"""`radixgrove completion SHELL`: what to put into a shell's start-up file."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script, e.g. eval "$(radixgrove completion bash)"."""
    from radixgrove.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "radixgrove", "_RADIXGROVE_COMPLETE").source())
