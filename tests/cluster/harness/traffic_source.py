"""Sends streaming chat completions without pause; runs inside a pod, as `traffic` starts it.

`python -m tests.cluster.harness.traffic_source URL MODEL CLIENTS TOKENS PATIENCE`, until standard
input ends. One line of JSON a finished request: when it began, its seconds, the text that came and,
unless it went well, what was wrong. After `PATIENCE` seconds a request is given up.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

_LIFETIME = 1800.0  # seconds, in case the parent ends without stopping this


async def main(url: str, model: str, clients: int, tokens: int, patience: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(
        lambda _: stop.set()
    )
    # No connection is used twice: a request must not profit from an older one's luck.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=patience)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with asyncio.timeout(_LIFETIME):
            work = (_client(session, url, model, tokens, n, stop) for n in range(clients))
            await asyncio.gather(*work)


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    tokens: int,
    number: int,
    stop: asyncio.Event,
) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Client {number} counts to {turn}."}],
            "max_tokens": tokens,
            "stream": True,
        }
        began, started, text = time.time(), time.monotonic(), list[str]()
        try:
            failure = await _stream(session, url, body, text)
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        line = {"began": began, "seconds": seconds, "text": "".join(text), "failure": failure}
        print(json.dumps(line), flush=True)


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], text: list[str]
) -> str:
    """What was wrong with the answer, or an empty string; what comes of it is added to `text`."""
    async with session.post(f"{url}/chat/completions", json=body) as answer:
        if answer.status != 200:
            return f"{answer.status}: {(await answer.text())[:500]}"
        finish = ""
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return "" if finish in ("stop", "length") else f"finish_reason {finish!r}"
            if not data or data.startswith(":"):
                continue
            event = json.loads(data)
            if "error" in event:
                return f"error within the stream: {event['error']}"
            text += (c["delta"].get("content") or "" for c in event["choices"])
            finish = next((c["finish_reason"] for c in event["choices"]), None) or finish
    return "the stream ended without [DONE]"


if __name__ == "__main__":
    url, model, clients, tokens, patience = sys.argv[1:]
    asyncio.run(main(url, model, int(clients), int(tokens), float(patience)))
