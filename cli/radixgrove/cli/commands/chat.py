"""`radixgrove chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from typing import Any

import click

from radixgrove.cli.client import (
    RequestRefused,
    Unreachable,
    api_key,
    events,
    fetch,
    request,
    url_option,
)

_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"
_IDLE_TIMEOUT = 600.0


class Conversation:
    """Turns so far, and how to get the next one."""

    def __init__(self, url: str, model: str, system: str | None, options: dict[str, Any]) -> None:
        self._url = url
        self._model = model
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def reset(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str) -> None:
        """Stream the answer to standard output; a failed or stopped turn leaves no trace.

        Raises:
            RequestRefused: the server does not take the turn.
            Unreachable: the answer broke off.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._model, "messages": turn, "stream": True, **self._options}
        answer = ""
        with request(
            self._url,
            "POST",
            "/v1/chat/completions",
            body=body,
            key=api_key(),
            timeout=_IDLE_TIMEOUT,
        ) as response:
            try:
                for event in events(response):
                    for choice in event.get("choices", ()):
                        piece = choice["delta"].get("content") or ""
                        answer += piece
                        click.echo(piece, nl=False)
                        sys.stdout.flush()
            except KeyboardInterrupt:
                click.echo(" (stopped)")
                return  # closing the connection makes the server abort the request
        click.echo()
        self.messages = [*turn, {"role": "assistant", "content": answer}]


@click.command(help="Talk to a model in the terminal.")
@url_option
@click.option("--model", help="Model id; the endpoint's first one when absent.")
@click.option("--system", help="System message.")
@click.option("--temperature", type=float, default=0.7, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.argument("question", required=False)
def chat(
    url: str,
    model: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int,
    question: str | None,
) -> None:
    """With QUESTION: one answer, then the end."""
    options = {"temperature": temperature, "max_tokens": max_tokens}
    conversation = Conversation(url, model or _first_model(url), system, options)
    if question is not None:
        conversation.ask(question)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 -- history and editing for input()

        click.echo(_HELP)
    while (text := _read(interactive)) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text:
            try:
                conversation.ask(text)
            except (RequestRefused, Unreachable) as error:
                if not interactive:
                    raise
                error.show()


def _read(interactive: bool) -> str | None:
    """The next line, or None at the end of input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _first_model(url: str) -> str:
    models = fetch(url, "GET", "/v1/models", key=api_key())["data"]
    if not models:
        raise Unreachable("the endpoint serves no model yet: see `radixgrove ps`")
    return str(models[0]["id"])
