"""Requests that no library of a client sends, and the answers that they may get.

What is broken, hostile or of another protocol is refused, or passed over where it does not matter;
it never ends as a failure of the server.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from typing import Any

_SECONDS = 10.0  # for an answer
_CHAT = "/v1/chat/completions"
_DEEP = b"[" * 500_000 + b"]" * 500_000

Odd = tuple[bytes, set[int]]  # what is sent, and the statuses that are right; none: it is cut off


def _post(body: bytes, *headers: str, path: str = "/v1/completions", sized: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines += [f"Content-Length: {len(body)}"] if sized else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _nested(before: bytes, after: bytes, depth: int) -> bytes:
    return before * depth + b"{}" + after * depth


def odd_requests(model: str) -> dict[str, Odd]:
    """By what is odd about them; of an answer with text, `model` gives two tokens."""

    def body(**fields: Any) -> bytes:
        return json.dumps({"model": model, "prompt": "x", "max_tokens": 2, **fields}).encode()

    def raw(rest: bytes) -> bytes:
        return b'{"model":"%b","max_tokens":2,%b}' % (model.encode(), rest)

    def chat(**fields: Any) -> bytes:
        messages = [{"role": "user", "content": "x"}]
        fields = {"model": model, "messages": messages, "max_tokens": 2} | fields
        return _post(json.dumps(fields).encode(), path=_CHAT)

    def with_schema(schema: bytes) -> bytes:
        return _post(
            raw(
                b'"prompt":"x","response_format":{"type":"json_schema",'
                b'"json_schema":{"name":"x","schema":%b}}' % schema
            )
        )

    plain = body()
    unsized = {"sized": False}
    return {
        "nothing": (_post(plain), {200}),
        # ---- JSON ------------------------------------------------------------------------------
        "a field that is nested without end": (_post(raw(b'"prompt":"x","x":' + _DEEP)), {400}),
        "a prompt that is nested without end": (_post(raw(b'"prompt":' + _DEEP)), {400}),
        "a field at the parser's depth": (
            _post(raw(b'"prompt":"x","x":' + b"[" * 1000 + b"]" * 1000)),
            {200, 400},
        ),
        "a schema nested without end": (with_schema(_nested(b'{"items":', b"}", 20_000)), {400}),
        "a deep schema": (with_schema(_nested(b'{"properties":{"a":', b"}}", 480)), {200, 400}),
        "arguments of a call that are nested without end": (
            chat(
                messages=[
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "function": {"name": "f", "arguments": "[" * 50_000},
                            }
                        ],
                    },
                ]
            ),
            {200, 400},
        ),
        "UTF-16": (_post(plain.decode().encode("utf-16")), {400}),
        "a byte order mark": (_post(b"\xef\xbb\xbf" + plain), {200, 400}),
        "half a surrogate pair": (_post(raw(b'"prompt":"a\\ud800b"')), {200, 400}),
        "a zero byte in the prompt": (_post(body(prompt="a\0b")), {200}),
        "no body": (_post(b""), {400}),
        "null": (_post(b"null"), {400}),
        "an array": (_post(b"[]"), {400}),
        # ---- values ----------------------------------------------------------------------------
        "a number that is none": (_post(raw(b'"prompt":"x","temperature":NaN')), {400}),
        "a number without end": (_post(raw(b'"prompt":"x","temperature":1e999')), {400}),
        "five thousand digits": (_post(raw(b'"prompt":"x","seed":' + b"9" * 5000)), {400}),
        "a billion choices": (_post(body(n=10**9)), {400}),
        "prompts of nothing": (_post(body(prompt=[[]] * 100_000)), {400}),
        "token ids below zero": (_post(body(prompt=[-1, 2])), {400}),
        "token ids beyond any": (_post(body(prompt=[2**40])), {400}),
        "truth as token ids": (_post(body(prompt=[True, False])), {400}),
        "a hundred thousand stop strings": (_post(body(stop=["x"] * 100_000)), {400}),
        "biases of all numbers": (
            _post(body(logit_bias={str(n): 1 for n in range(100_000)})),
            {400},
        ),
        "a user's name of a megabyte": (_post(body(user="x" * 1_000_000)), {200, 400}),
        "a model's name of a megabyte": (_post(body(model="x" * 1_000_000)), {404}),
        "a model's name of control characters": (_post(body(model="a\r\nb\0\u2028")), {404}),
        "a role of an escape sequence": (
            chat(messages=[{"role": "\x00\x1b[31m", "content": "x"}]),
            {200, 400},
        ),
        "a hundred thousand messages": (
            chat(messages=[{"role": "user", "content": "x"}] * 100_000),
            {400, 413},
        ),
        "tokens that are none, to be text": (
            _post(json.dumps({"model": model, "tokens": [-5, 2**63]}).encode(), path="/detokenize"),
            {400},
        ),
        # ---- HTTP ------------------------------------------------------------------------------
        "a body in gzip": (_post(gzip.compress(plain), "Content-Encoding: gzip"), {400, 415}),
        "two lengths": (_post(plain, "Content-Length: 5"), {400}),
        "a length below zero": (_post(plain, "Content-Length: -1", **unsized), {400}),
        "a length with a sign": (
            _post(plain, f"Content-Length: +{len(plain)}", **unsized),
            {400},
        ),
        "a length beyond any": (_post(plain, "Content-Length: " + "9" * 23, **unsized), {400, 413}),
        "a length of a terabyte": (_post(plain, f"Content-Length: {10**12}", **unsized), {413}),
        "a length, and chunks": (_post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), {400}),
        "an encoding that is none": (_post(plain, "Transfer-Encoding: xchunked"), {400}),
        "chunked twice": (
            _post(b"0\r\n\r\n", "Transfer-Encoding: chunked, chunked", **unsized),
            {400},
        ),
        "a chunk beyond any": (
            _post(b"f" * 17 + b"\r\nx\r\n", "Transfer-Encoding: chunked", **unsized),
            {400},
        ),
        "a chunk below zero": (
            _post(b"-1\r\nx\r\n", "Transfer-Encoding: chunked", **unsized),
            {400},
        ),
        "trailers without end": (
            _post(
                b"%x\r\n%b\r\n0\r\n%b\r\n"
                % (len(plain), plain, b"".join(b"x%d: y\r\n" % n for n in range(40_000))),
                "Transfer-Encoding: chunked",
                **unsized,
            ),
            {200, 400, 431},
        ),
        "a space before a colon": (_post(plain, "X-A : b"), {400}),
        "a zero byte in a header": (_post(plain, "X-A: a\0b"), {400}),
        "a header of other letters": (_post(plain, "X-Request-Id: \xff\xfe\xe4"), {200}),
        "a header of a megabyte": (_post(plain, "X-A: " + "a" * 1_000_000), {431}),
        "sixty thousand headers": (_post(plain, *[f"X-{n}: y" for n in range(60_000)]), {431}),
        "a path of a megabyte": (
            b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            {414, 431},
        ),
        "a body that is announced": (_post(plain, "Expect: 100-continue"), {200}),
        "no host": (b"GET /livez HTTP/1.1\r\n\r\n", {200, 400}),
        "a method that is none here": (b"TRACE /livez HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
        # ---- other protocols -------------------------------------------------------------------
        "a greeting in TLS": (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + b"x" * 190, {400}),
        "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
        "a command of Redis": (b"*1\r\n$4\r\nPING\r\n", {400}),
        "bytes of all kinds": (bytes(range(256)) * 4, {400}),
    }


async def send(port: int, data: bytes) -> list[int]:
    """The statuses of all that comes back; what comes before an answer (100) is left out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_SECONDS):
            writer.write(data)
            while not _is_whole(came) and (part := await reader.read(1 << 16)):
                came += part
    writer.close()
    heads = came.split(b"HTTP/1.1 ")[1:]
    return [int(head[:3]) for head in heads if not head.startswith(b"100")]


def _is_whole(came: bytes) -> bool:
    head, end, body = came.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return bool(end and length) and len(body) >= int(length)
