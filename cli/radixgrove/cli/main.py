"""The `radixgrove` command: a lazy group, so that help and version load next to nothing."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import click

from radixgrove.service import exit_codes
from radixgrove.service.user import know_user

# name -> (module of `radixgrove.cli.commands`, attribute, one line of help)
_COMMANDS = {
    "up": ("up", "up", "Run a whole cluster on this machine: Redis, router, workers."),
    "chat": ("chat", "chat", "Talk to a model in the terminal."),
    "ps": ("ps", "ps", "Show replicas, their state and load on one screen."),
    "worker": ("parts", "worker", "Run one worker: an engine and its HTTP frontends."),
    "router": ("parts", "router", "Run a router: one endpoint before all replicas."),
    "drain": ("drain", "drain", "Let a replica finish and send it nothing new."),
    "undrain": ("drain", "undrain", "Send a drained replica requests again."),
    "doctor": ("doctor", "doctor", "Check this machine and the configuration."),
    "compile-kernels": (
        "compile_kernels",
        "compile_kernels_command",
        "Compile attention for GPUs that need not be here.",
    ),
    "config": ("config", "config", "Show settings and where each came from."),
    "bench": ("bench", "bench", "Measure a running endpoint."),
    "completion": ("completion", "completion", "Print the completion script of a shell."),
}


_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class LazyGroup(click.Group):
    """Imports a command's module only when that very command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"radixgrove.cli.commands.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{name}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="radixgrove", message="radixgrove %(version)s")
def cli() -> None:
    """LLM serving with radix prefix caches and a cache-aware router.

    Start with `radixgrove up`: it ends by printing a URL and a curl command.
    """


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script. Never returns."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    know_user()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from radixgrove.service.processes import open_standard_streams

        open_standard_streams()
    try:
        result: Any = cli.main(args=arguments, prog_name="radixgrove", standalone_mode=False)
    except click.NoSuchOption as error:
        from radixgrove.cli.configuration import secret_hint

        text = error.format_message() + secret_hint(error.option_name)
        click.UsageError(text, error.ctx).show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # `radixgrove … | head`
        sys.stderr.close()
        return exit_codes.OK
    except OSError as error:
        if error.errno not in _FULL_DISK:
            raise
        text = f"{error.strerror}: the output, a log or a temporary file cannot be written"
        click.ClickException(text).show()
        return exit_codes.FAILED
    return result if isinstance(result, int) else exit_codes.OK
