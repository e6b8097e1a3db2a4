"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`.

Messages are fixed texts that name the offending parameter; they never carry exception texts, paths
or addresses. `code` is a string or null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from radixgrove.protocol.errors import RadixgroveError

INVALID_REQUEST = "invalid_request_error"


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(RadixgroveError):
    """An answer with an error status. Raise it anywhere below an HTTP handler.

    `headers` are sent with it (lower-case names).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body of the response."""
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(detail))

    def event(self) -> bytes:
        """The same as a server-sent event: how a stream that already began reports failure."""
        return b"data: " + self.body() + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str | None = None) -> ApiError:
    """The request asks for something this server does not do; ignoring it would mislead."""
    return ApiError(
        400,
        message or f"'{param}' is not supported by this server.",
        param=param,
        code="unsupported_parameter",
    )


def context_length_exceeded(limit: int, prompt: int, completion: int, param: str) -> ApiError:
    """The prompt, or prompt and requested completion together, do not fit the model.

    Clients match the beginning of this text, or the code, to start compacting a conversation.
    """
    head = f"This model's maximum context length is {limit} tokens. "
    if completion <= 1:
        text = (
            f"However, your {param} resulted in {prompt} tokens. "
            f"Please reduce the length of the {param}."
        )
    else:
        text = (
            f"However, you requested {prompt + completion} tokens ({prompt} in the {param}, "
            f"{completion} in the completion). Please reduce the length of the {param} or "
            "completion."
        )
    return ApiError(400, head + text, param=param, code="context_length_exceeded")


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404,
        f"The model '{shorten(model)}' does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def not_found(method: str, path: str) -> ApiError:
    return ApiError(404, f"Invalid URL ({shorten(method)} {shorten(path)}).", code="unknown_url")


def method_not_allowed(method: str, allow: str) -> ApiError:
    return ApiError(
        405,
        f"Not allowed to {shorten(method)} this URL (allowed: {allow}).",
        code="method_not_supported",
        headers={"allow": allow},
    )


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {limit} bytes.", code="request_too_large"
    )


def answer_too_large() -> ApiError:
    return ApiError(
        400,
        "The answer takes too much memory until it is read. Ask for fewer choices, tokens or "
        "log-probabilities, or for a stream.",
        code="answer_too_large",
    )


def unsupported_media_type(expected: str = "application/json") -> ApiError:
    return ApiError(415, f"The content type must be '{expected}'.", code="unsupported_media_type")


def compressed(encoding: str) -> ApiError:
    return ApiError(
        415,
        f"A body in the content encoding '{shorten(encoding, 32)}' is not read: send it as it is.",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "identity"},
    )


def unauthorized(given: bool) -> ApiError:
    text = (
        "Incorrect API key provided."
        if given
        else "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'."
    )
    return ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def rate_limited(retry_after: float | None = None) -> ApiError:
    """The queue is full. Clients retry after `retry_after` seconds; some read them in the text."""
    headers = _retry_after(retry_after)
    return ApiError(
        429,
        f"Too many requests are waiting. Please try again in {headers['retry-after']}s.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=headers,
    )


def overloaded(message: str, retry_after: float | None = None) -> ApiError:
    """The server cannot take the request now: starting, draining, no replica, timed out."""
    return ApiError(
        503,
        message,
        type="server_error",
        code="service_unavailable",
        headers=_retry_after(retry_after),
    )


def timed_out() -> ApiError:
    """The answer took longer than it may: sent again, the same job would take as long again.

    OpenAI's clients retry every 5xx by themselves, unless a header forbids it.
    """
    return ApiError(
        504,
        "The model did not answer in time. Ask for fewer tokens, or for a stream.",
        type="server_error",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def internal() -> ApiError:
    return ApiError(
        500,
        "The server had an error while processing your request.",
        type="server_error",
        code="internal_error",
    )


def _retry_after(seconds: float | None) -> dict[str, str]:
    # Whole seconds only (RFC 9110, 10.2.3); clients honour up to 120.
    return {"retry-after": str(min(120, max(1, math.ceil(seconds or 1.0))))}


def shorten(text: str, limit: int = 200) -> str:
    """What a client sent, as much of it as a message may repeat."""
    return text if len(text) <= limit else text[:limit] + "…"
