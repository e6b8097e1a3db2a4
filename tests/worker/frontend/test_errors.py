"""Every error has OpenAI's body, the right status, and names the parameter."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from radixgrove.worker.messages import RefusalReason, Refused
from tests.conftest import wait_until
from tests.worker.frontend.conftest import MODEL, Frontend, StartFrontend

MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (key,) = response.json()
    assert key == "error"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def post(frontend: Frontend, path: str, content: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    with frontend.client() as client:
        return client.post(path, content=content, headers=headers)


NOT_OBJECTS = [
    *(b"", b"[]", b'"x"', b"5", b"{", b"\x00"),
    *(b'{"model": "\xff\xfe"}', b'{"unknown": "\xff"}', b'{"model":"\\ud800"}'),
    *(b"[" * 100_000, b'{"a":' * 100_000),
]
UNKNOWN_PATHS = [
    *("/", "/v1", "/v1/responses", "/v1/embeddings", "/v1/chat/completions/", "/invocations"),
    *("/docs", "/v1/nothing", "/internal/tokenizer/0/tokenizer.json/.."),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_bodies_that_are_no_json_object(frontend: Frontend, path: str, body: bytes) -> None:
    error = error_of(post(frontend, path, body), 400)
    assert error["type"] == "invalid_request_error"


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages[0].role"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 10**30}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"191222": -100}}, "logit_bias"),
    ({"logit_bias": {"foo": 0}}, "logit_bias"),
    ({"logit_bias": {"-1": 0}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [9_999_999], "min_tokens": 1}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"priority": 10**9}, "priority"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
    ({"structural_tag": {}}, "structural_tag.type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"unread": 1}}, "chat_template_kwargs.unread"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES)
def test_chat_parameters_are_checked_by_name(
    frontend: Frontend, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    error = error_of(post(frontend, "/v1/chat/completions", json.dumps(body).encode()), 400)
    assert error["param"] == param
    assert frontend.engine.submits == []


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({"3": 1, "49152": 0}, "The key '49152' of 'logit_bias' is no token id from 0 to 49151."),
        ({"the": 1}, "The key 'the' of 'logit_bias' is no token id from 0 to 49151."),
        ({"x" * 99: 1}, f"The key '{'x' * 32}…' of 'logit_bias' is no token id from 0 to 49151."),
        *(
            (
                {"3": 1, "4": value},
                "The value of the key '4' of 'logit_bias' must be a number from -100 to 100.",
            )
            for value in (-101, None, "1", True, [1])
        ),
    ],
)
def test_refused_biases_are_named(frontend: Frontend, bias: dict[str, Any], said: str) -> None:
    assert error_of(frontend.chat("hi", logit_bias=bias), 400)["message"] == said


@pytest.mark.parametrize("last", ["null", '{"1": 1}', '{"1": "x", "1": 1}'])
def test_a_refused_bias_that_the_last_of_two_keys_hides(frontend: Frontend, last: str) -> None:
    body = (
        f'{{"model": "{MODEL}", "messages": [], "logit_bias": {{"1": "x"}}, "logit_bias": {last}}}'
    )
    error = error_of(post(frontend, "/v1/chat/completions", body.encode()), 400)
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [10**20]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [-5]]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "best_of": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_completion_parameters_are_checked_by_name(
    frontend: Frontend, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "prompt": "hi", **fields}
    error = error_of(post(frontend, "/v1/completions", json.dumps(body).encode()), 400)
    assert error["param"] == param
    assert frontend.engine.submits == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309"])
@pytest.mark.parametrize("param", ["temperature", "top_p", "repetition_penalty", "min_p"])
def test_numbers_that_are_none(frontend: Frontend, number: str, param: str) -> None:
    body = f'{{"model":"{MODEL}","prompt":"hi","{param}": {number}}}'.encode()
    assert error_of(post(frontend, "/v1/completions", body), 400)["param"] == param


def test_harmless_extremes_are_accepted(frontend: Frontend) -> None:
    response = frontend.chat("x", temperature=-0.0, top_k=10**15, seed=-(1 << 63), top_p=0)
    assert response.status_code == 200
    sampling = frontend.engine.submits[-1].sampling
    assert str(sampling.temperature) == "0.0"
    assert sampling.top_k == 1  # an empty nucleus is the most probable token alone
    assert sampling.seed >= 0


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "alone"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, *MESSAGES],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, *MESSAGES],
        [{"role": "user", "content": "a"}, {"role": "assistant"}, *MESSAGES],
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}, *MESSAGES],
        [{"role": "developer", "content": "be brief"}, *MESSAGES],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"}],
        [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}],
    ],
)
def test_messages_that_clients_really_send(
    frontend: Frontend, messages: list[dict[str, Any]]
) -> None:
    body = {"model": MODEL, "messages": messages}
    response = post(frontend, "/v1/chat/completions", json.dumps(body).encode())
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("tokens", [9000, 50_000])
def test_prompt_longer_than_the_context(frontend: Frontend, tokens: int) -> None:
    error = error_of(frontend.chat("word " * tokens), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 8192 tokens.")
    assert "Please reduce the length of the messages" in error["message"]
    assert error["param"] == "messages"


def test_completion_longer_than_the_context(frontend: Frontend) -> None:
    for response in (
        frontend.chat("x", max_tokens=50_000),
        frontend.complete("x", max_tokens=8192),
    ):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 8192 tokens.")
    assert frontend.engine.submits == []


@pytest.mark.parametrize("path", UNKNOWN_PATHS)
def test_unknown_routes(frontend: Frontend, path: str) -> None:
    with frontend.client() as client:
        for method in ("GET", "POST"):
            assert error_of(client.request(method, path), 404)["type"] == "invalid_request_error"


def test_wrong_methods(frontend: Frontend) -> None:
    with frontend.client() as client:
        response = client.get("/v1/chat/completions")
        assert error_of(response, 405)["code"] == "method_not_supported"
        assert response.headers["allow"] == "POST"
        error_of(client.delete("/v1/models"), 405)


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [9_999_999]}, {"temperature": 9}])
def test_unknown_model(frontend: Frontend, fields: dict[str, Any]) -> None:
    """Whatever else the body asks for: by the limits of this model it is not judged."""
    error = error_of(frontend.chat("x", model="gpt-unknown", **fields), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_body_limit_and_content_type(frontend: Frontend) -> None:
    big = b'{"model": "' + b"x" * (9 << 20) + b'"}'
    assert error_of(post(frontend, "/v1/completions", big), 413)["code"] == "request_too_large"
    with frontend.client() as client:
        chunked = client.post(
            "/v1/completions",
            content=iter([big[: 5 << 20], big[5 << 20 :]]),
            headers={"content-type": "application/json"},
        )
        error_of(chunked, 413)
        error_of(client.post("/v1/completions", data={"model": MODEL}), 415)
        error_of(client.post("/v1/completions", content=b"{}"), 415)
        packed = client.post(
            "/v1/completions",
            content=gzip.compress(b"{}"),
            headers={"content-type": "application/json", "content-encoding": "gzip"},
        )
        assert error_of(packed, 415)["code"] == "unsupported_content_encoding"
        assert packed.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (RefusalReason.QUEUE_FULL, 429, "rate_limit_exceeded"),
        (RefusalReason.QUEUE_TIMEOUT, 503, "service_unavailable"),
        (RefusalReason.TOO_LONG, 400, "context_length_exceeded"),
        (RefusalReason.GRAMMAR_TOO_COMPLEX, 400, "grammar_too_complex"),
        (RefusalReason.GRAMMAR_FAILED, 400, "grammar_failed"),
        (RefusalReason.INTERNAL, 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine(
    frontend: Frontend, reason: RefusalReason, status: int, code: str, stream: bool
) -> None:
    frontend.engine.refuse = lambda submit: Refused(
        request_id=submit.request_id, reason=reason, detail="Too long.", retry_after=2.5
    )
    response = frontend.chat("x", stream=stream)
    assert error_of(response, status)["code"] == code
    if status in (429, 503):
        assert response.headers["retry-after"] == "3"
    if status == 429:  # codex reads the seconds from the text
        assert "try again in 3s" in response.json()["error"]["message"]


def test_one_refused_choice_ends_all_others(frontend: Frontend) -> None:
    frontend.engine.step_seconds = 0.05
    frontend.answer("a long answer of many words " * 50)
    frontend.engine.refuse = lambda submit: (
        Refused(request_id=submit.request_id, reason=RefusalReason.QUEUE_FULL, detail="")
        if submit.request_id.endswith(":2")
        else None
    )
    error_of(frontend.chat("x", n=3), 429)
    ids = {submit.request_id for submit in frontend.engine.submits}
    others = {name for name in ids if not name.endswith(":2")}
    assert len(others) == 2
    wait_until(lambda: set(frontend.engine.aborts) == others, what="the others' abort")


def test_request_ids_and_traces(frontend: Frontend) -> None:
    with frontend.client() as client:
        kept = client.get("/v1/models", headers={"x-request-id": "my-id-1"})
        assert kept.headers["x-request-id"] == "my-id-1"
        for hostile in ("x" * 500, "a b", "a;{}"):
            replaced = client.get("/v1/models", headers={"x-request-id": hostile})
            assert replaced.headers["x-request-id"].startswith("req-")
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        client.get("/v1/models", headers={"traceparent": trace, "x-request-id": "traced"})
    log = frontend.logged("request_id=traced")
    lines = [line for line in log.splitlines() if "request_id=traced" in line]
    assert len(lines) == 1
    assert "trace_id=0af7651916cd43dd8448eb211c80319c" in lines[0]


def test_prompts_and_answers_never_reach_the_log(frontend: Frontend) -> None:
    frontend.answer("canary-answer-8231")
    assert frontend.chat("canary-prompt-5512").status_code == 200
    with frontend.client(**{"x-request-id": "last-canary"}) as client:
        body = {"model": MODEL, "messages": MESSAGES, "temperature": "canary-prompt-5512"}
        error_of(client.post("/v1/chat/completions", json=body), 400)
    log = frontend.logged("request_id=last-canary")
    assert "canary-prompt" not in log
    assert "canary-answer" not in log


def raw(frontend: Frontend, data: bytes) -> bytes:
    """What comes back on a connection for these bytes."""
    host, port = frontend.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def refused(frontend: Frontend, data: bytes, status: int) -> dict[str, Any]:
    """The error that these bytes got, which has an id and one line in the access log."""
    head, _, body = raw(frontend, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    identity = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert identity
    log = frontend.logged(f"request_id={identity}")
    lines = [line for line in log.splitlines() if f"request_id={identity} " in line]
    assert len(lines) == 1
    assert "radixgrove.access" in lines[0]
    assert f" status={status} " in lines[0]
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_requests_that_are_no_http(frontend: Frontend) -> None:
    for data in (b"nonsense\r\n\r\n", b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n"):
        assert refused(frontend, data, 400)["type"] == "invalid_request_error"


def test_broken_body_is_answered_once_with_the_requests_own_id(frontend: Frontend) -> None:
    broken = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-request-id: broken-body-1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcdeXX"
    )
    refused(frontend, broken, 400)
    assert frontend.chat("x").status_code == 200  # by now all is logged
    assert frontend.logged("broken-body-1").count("request_id=broken-body-1") == 1


def test_what_is_no_http_behind_a_request_does_not_get_into_its_answer(
    frontend: Frontend,
) -> None:
    frontend.engine.step_seconds = 0.05
    frontend.answer("word " * 1000)  # it is under way for a minute
    host, port = frontend.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"nonsense\r\n\r\n")
        while chunk := connection.recv(65536):
            received += chunk
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"[DONE]" not in received
    frontend.answer("fine")
    assert frontend.chat("x").status_code == 200


def test_body_that_breaks_after_its_answer_gets_no_second_one(frontend: Frontend) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    host, port = frontend.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head)
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"no chunk size\r\n")
        while chunk := connection.recv(65536):
            received += chunk
    assert received.count(b"HTTP/1.1 ") == 1


def test_headers_are_bounded(frontend: Frontend) -> None:
    start = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
    many = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 100) for i in range(2000))
    for data in (start + many, start + b"x-long: " + b"y" * 200_000, b"GET /" + b"y" * 200_000):
        assert refused(frontend, data, 431)["code"] == "headers_too_large"
    assert frontend.chat("x").status_code == 200


def test_requests_must_arrive_whole_in_time(start_frontend: StartFrontend) -> None:
    frontend = start_frontend(request_timeout=0.3)
    start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for partial in (start, start + b"content-length: 100\r\n\r\n{"):
        assert refused(frontend, partial, 408)["code"] == "request_timeout"
    assert raw(frontend, b"") == b""
    assert raw(frontend, b"\r\n") == b""
    frontend.engine.step_seconds = 0.1
    frontend.answer("an answer that takes longer than a request may")
    assert frontend.chat("x").status_code == 200


def test_the_document_lists_what_is_served_and_nothing_else(frontend: Frontend) -> None:
    document = httpx.get(f"{frontend.url}/openapi.json", verify=False).json()
    validate(document)
    assert set(document["paths"]) == {
        *("/livez", "/health", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"),
        *("/v1/chat/completions", "/v1/completions", "/internal/tokenizer/{digest}/{file}"),
        *("/tokenize", "/detokenize"),
    }
    for path, methods in document["paths"].items():
        assert httpx.post(f"{frontend.url}{path}", verify=False).status_code == (
            405 if "get" in methods else 415
        )
        if "get" in methods and "{" not in path:
            for method in ("GET", "HEAD"):
                assert (
                    httpx.request(method, f"{frontend.url}{path}", verify=False).status_code == 200
                )


@pytest.mark.parametrize("examples", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_no_request_that_its_document_allows_or_forbids_is_a_failure(
    frontend: Frontend, examples: int
) -> None:
    from tests.drawn_requests import send_drawn_requests

    with frontend.client() as client:
        document = client.get("/openapi.json").json()
    statuses = send_drawn_requests(frontend.url, document, MODEL, examples=examples)
    assert statuses[200] > 0
    assert statuses[400] > 0
