"""Disconnects, overload, a dying engine, drains, keys and envelopes."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.messages import RefusalReason, Refused
from tests.conftest import wait_until
from tests.worker.frontend.conftest import (
    INTERNAL_KEY,
    MODEL,
    Frontend,
    StartFrontend,
    is_ready,
    prompt_text,
    running_frontend,
)

LONG = "word " * 4000


def chat_body(stream: bool, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    return json.dumps({**body, **fields}).encode()


def raw_request(frontend: Frontend, body: bytes) -> socket.socket:
    """A connection with one request on it, to be closed at will."""
    host, port = frontend.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return connection


def assert_freed(frontend: Frontend, sequences: int) -> None:
    wait_until(lambda: not frontend.engine.running, what="the end of all sequences")
    assert len(set(frontend.engine.aborts)) == sequences


# ---- disconnects -------------------------------------------------------------------------------


def test_disconnect_in_mid_stream_frees_the_engine(frontend: Frontend) -> None:
    frontend.answer(LONG)
    frontend.engine.step_seconds = 0.02
    connection = raw_request(frontend, chat_body(stream=True, n=2))
    received = b""
    while received.count(b"data: ") < 5:
        received += connection.recv(4096)
    assert len(frontend.engine.running) == 2
    connection.close()
    assert_freed(frontend, 2)


def test_disconnect_before_the_first_byte_of_a_stream(frontend: Frontend) -> None:
    frontend.engine.paused.set()
    connection = raw_request(frontend, chat_body(stream=True))
    wait_until(lambda: len(frontend.engine.running) == 1, what="the request at the engine")
    connection.close()
    assert_freed(frontend, 1)


def test_disconnect_of_a_request_that_does_not_stream(frontend: Frontend) -> None:
    frontend.answer(LONG)
    frontend.engine.step_seconds = 0.02
    connection = raw_request(frontend, chat_body(stream=False, n=3))
    wait_until(lambda: len(frontend.engine.running) == 3, what="the request at the engine")
    connection.close()
    assert_freed(frontend, 3)


def test_disconnect_while_the_body_is_sent_reaches_no_engine(frontend: Frontend) -> None:
    host, port = frontend.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
    assert frontend.chat("next").status_code == 200
    assert len(frontend.engine.submits) == 1


def test_a_hundred_timed_out_requests_leave_room_for_the_next(frontend: Frontend) -> None:
    frontend.answer(LONG)
    frontend.engine.step_seconds = 0.02

    def give_up(_: int) -> None:
        with (
            httpx.Client(timeout=0.3, verify=False) as client,
            pytest.raises(httpx.TimeoutException),
        ):
            client.post(
                f"{frontend.url}/v1/chat/completions",
                content=chat_body(stream=False),
                headers={"content-type": "application/json"},
            )

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(give_up, range(100)))
    # Requests that lose their clients before they come to the engine need not come there at all.
    in_flight = "radixgrove_http_requests_in_flight"
    wait_until(lambda: frontend.metrics()[in_flight] == 0, what="an empty frontend")
    wait_until(lambda: not frontend.engine.running, what="the end of all sequences")
    submitted = {submit.request_id for submit in frontend.engine.submits}
    assert submitted
    assert set(frontend.engine.aborts) == submitted
    frontend.answer("still here")
    assert frontend.chat("x").json()["choices"][0]["message"]["content"] == "still here"


def test_stop_string_ends_the_engines_work(frontend: Frontend) -> None:
    frontend.answer("one two three " + LONG)
    frontend.engine.step_seconds = 0.005
    response = frontend.chat("x", stop=["three"])
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert_freed(frontend, 1)


# ---- overload ----------------------------------------------------------------------------------


def test_every_request_of_a_burst_gets_an_answer_or_a_refusal(
    start_frontend: StartFrontend,
) -> None:
    frontend = start_frontend(max_queued=4, max_running=4)
    frontend.answer("fine")
    frontend.engine.step_seconds = 0.05
    frontend.engine.refuse = lambda submit: (
        Refused(
            request_id=submit.request_id,
            reason=RefusalReason.QUEUE_FULL,
            detail="full",
            retry_after=2,
        )
        if len(frontend.engine.running) >= 2
        else None
    )
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: frontend.chat("x"), range(200)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    outcomes = {
        name: value
        for name, value in frontend.metrics().items()
        if name.startswith("radixgrove_requests_total")
    }
    assert sum(outcomes.values()) == 200


def test_the_queues_patience_travels_to_the_engine_as_a_duration(
    start_frontend: StartFrontend,
) -> None:
    frontend = start_frontend(queue_timeout=7)
    frontend.answer("x")
    assert frontend.chat("x").status_code == 200
    assert frontend.engine.submits[0].queue_timeout == 7


# ---- the engine's death -------------------------------------------------------------------------


def test_engine_death_in_mid_stream_is_an_error_event(start_frontend: StartFrontend) -> None:
    frontend = start_frontend()
    frontend.answer(LONG)
    frontend.engine.step_seconds = 0.02
    with (
        frontend.client() as client,
        client.stream(
            "POST",
            "/v1/chat/completions",
            content=chat_body(stream=True, stream_options={"include_usage": True}),
            headers={"content-type": "application/json"},
        ) as response,
    ):
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        frontend.engine.stop()
        rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "[DONE]" not in rest
    *chunks, last = [json.loads(line) for line in rest]
    assert set(last) == {"error"}
    assert last["error"]["message"] == "The engine has stopped."
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert httpx.get(f"{frontend.url}/readyz", verify=False).status_code == 503
    assert httpx.get(f"{frontend.url}/livez", verify=False).status_code == 200


def test_engine_death_answers_waiting_requests(start_frontend: StartFrontend) -> None:
    frontend = start_frontend()
    frontend.engine.paused.set()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(frontend.chat, "x", stream=stream) for stream in (False, True) * 2]
        wait_until(lambda: len(frontend.engine.running) == 4, what="all requests at the engine")
        frontend.engine.stop()
        for answer in waiting:
            response = answer.result(timeout=30)
            assert response.status_code == 503
            assert response.headers["retry-after"]
    assert frontend.chat("x").status_code == 503


def test_a_silent_engine_is_given_up(start_frontend: StartFrontend) -> None:
    frontend = start_frontend()
    frontend.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(frontend.chat, "x")
        wait_until(lambda: len(frontend.engine.running) == 1, what="the request at the engine")
        frontend.engine.silent.set()
        wait_until(lambda: not is_ready(frontend), what="the end of readiness")
        response = waiting.result(timeout=30)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "The engine has stopped."


# ---- drains ------------------------------------------------------------------------------------


def test_sigterm_finishes_running_streams_and_refuses_new_ones(
    start_frontend: StartFrontend,
) -> None:
    frontend = start_frontend(drain_timeout=20)
    frontend.answer("a b c d e f g h i j k l m n o p q r s t u v w x y z")
    frontend.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(frontend.chat, "x", stream=True)
        wait_until(lambda: len(frontend.engine.running) == 1, what="the stream at the engine")
        frontend.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(frontend), what="the drain")
        refused = frontend.chat("new")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        frontend.engine.paused.clear()
        response = running.result(timeout=20)
    assert response.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in response.text
    assert frontend.process.wait(timeout=60) == 0


def test_requests_that_outlive_the_drain_end_with_an_error(start_frontend: StartFrontend) -> None:
    frontend = start_frontend(drain_timeout=0.5)
    frontend.answer(LONG)
    frontend.engine.step_seconds = 0.05
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(frontend.chat, "x", stream=True)
        whole = pool.submit(frontend.chat, "x")
        wait_until(lambda: len(frontend.engine.running) == 2, what="both at the engine")
        frontend.process.send_signal(signal.SIGTERM)
        assert whole.result(timeout=30).status_code == 503
        text = stream.result(timeout=30).text
    assert '"error"' in text.strip().splitlines()[-1]
    assert "[DONE]" not in text
    assert frontend.process.wait(timeout=60) == 0
    wait_until(lambda: not frontend.engine.running, what="the aborts at the engine")


# ---- keys and envelopes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _shared_keyed(
    tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path
) -> Iterator[Frontend]:
    keys = tmp_path_factory.mktemp("keyed") / "keys"
    keys.write_text("# two tenants\nalice: key-a\nbob: key-b\n")
    options = {"api_keys_file": str(keys), "management_key": "m"}
    origins = ["https://app.example"]
    with running_frontend(demo_model_dir, cors_origins=origins, **options) as frontend:
        yield frontend


@pytest.fixture
def keyed(_shared_keyed: Frontend) -> Frontend:
    """A frontend that asks for keys, its engine idle and with nothing submitted."""
    _shared_keyed.engine.reset()
    _shared_keyed.answer("fine")
    return _shared_keyed


def test_every_route_but_health_needs_a_key(keyed: Frontend) -> None:
    routes = ["/v1/models", f"/v1/models/{MODEL}", "/metrics", "/v1/chat/completions"]
    routes += [
        "/v1/completions",
        "/nothing",
        "/internal/tokenizer/0/tokenizer.json",
        "/v1/responses",
    ]
    client = keyed.client()
    for path in routes:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-a"}):
                response = client.request(method, path, headers=header)
                assert response.status_code == 401, (method, path)
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{keyed.url}/livez", verify=False).status_code == 200
    assert httpx.get(f"{keyed.url}/readyz", verify=False).status_code == 200


def test_a_web_page_asks_without_a_key_whether_it_may(keyed: Frontend) -> None:
    page = {"origin": "https://app.example"}
    asks = page | {"access-control-request-method": "POST"}
    allowed = keyed.client().options("/v1/chat/completions", headers=asks)
    refused = keyed.client().post("/v1/chat/completions", headers=page)
    assert [allowed.status_code, refused.status_code] == [200, 401]
    for response in (allowed, refused):
        assert response.headers["access-control-allow-origin"] == page["origin"]


def test_whoever_scrapes_metrics_needs_no_api_key(keyed: Frontend) -> None:
    for key, path, status in (("m", "/metrics", 200), ("m", "/v1/models", 401)):
        with keyed.client(key) as client:
            assert client.get(path).status_code == status


def test_the_key_decides_the_sharing_domain(keyed: Frontend) -> None:
    for key in ("key-a", "key-b"):
        body = json.loads(chat_body(stream=False, user="public", principal="public"))
        with keyed.client(key) as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert [submit.domain for submit in keyed.engine.submits] == ["alice", "bob"]


def test_a_salt_narrows_the_sharing_domain(keyed: Frontend) -> None:
    asked = [("key-a", "s"), ("key-a", "s"), ("key-a", "t"), ("key-b", "s"), ("key-a", "bob")]
    for key, salt in asked:
        with keyed.client(key) as client:
            body = json.loads(chat_body(stream=False, cache_salt=salt))
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    domains = [submit.domain for submit in keyed.engine.submits]
    assert domains[0] == domains[1]
    assert len(set(domains)) == 4
    assert not {"alice", "bob", "public"} & set(domains)
    assert not any("bob" in domain for domain in domains if domain != domains[3])


def test_shared_sharing_has_one_domain(start_frontend: StartFrontend) -> None:
    frontend = start_frontend(sharing="shared")
    frontend.answer("x")
    assert frontend.chat("x").status_code == 200
    assert frontend.engine.submits[0].domain == "public"


def envelope(frontend: Frontend, model_dir: Path, **fields: Any) -> bytes:
    ids = frontend.tokenizer.encode("routed prompt").ids
    values: dict[str, Any] = {
        "body": chat_body(stream=False),
        "prompts": [b"".join(number.to_bytes(4, "little") for number in ids)],
        "principal": "carol",
        "request_id": "reservation-1",
        "tokenizer_digest": TokenizerFiles.load(model_dir).digest,
        **fields,
    }
    return msgspec.msgpack.encode(Envelope(**values))


def post_envelope(frontend: Frontend, body: bytes, key: str | None) -> httpx.Response:
    headers = {"content-type": ENVELOPE_TYPE}
    if key is not None:
        headers[INTERNAL_KEY_HEADER] = key
    with frontend.client() as client:
        return client.post("/v1/chat/completions", content=body, headers=headers)


def test_envelope_with_the_internal_key(frontend: Frontend, demo_model_dir: Path) -> None:
    response = post_envelope(frontend, envelope(frontend, demo_model_dir), INTERNAL_KEY)
    assert response.status_code == 200, response.text
    (submit,) = frontend.engine.submits
    assert prompt_text(frontend, submit) == "routed prompt"
    assert submit.domain == "carol"
    assert submit.request_id == "reservation-1:0"


@pytest.mark.parametrize("key", [None, "", "wrong", INTERNAL_KEY + "x"])
def test_envelope_without_the_internal_key(
    frontend: Frontend, demo_model_dir: Path, key: str | None
) -> None:
    response = post_envelope(frontend, envelope(frontend, demo_model_dir), key)
    assert response.status_code == 401
    assert frontend.engine.submits == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_digest": "another"},
        {"prompts": []},
        {"prompts": [b""]},
        {"prompts": [b"\x01\x00\x00"]},
        {"prompts": [b"\xff\xff\xff\x7f"]},
    ],
)
def test_envelope_whose_ids_are_not_usable_is_encoded_anew(
    frontend: Frontend, demo_model_dir: Path, fields: dict[str, Any]
) -> None:
    body = envelope(frontend, demo_model_dir, **fields)
    assert post_envelope(frontend, body, INTERNAL_KEY).status_code == 200
    assert "<|im_start|>user\nx<|im_end|>" in prompt_text(frontend, frontend.engine.submits[0])


def test_malformed_envelopes(frontend: Frontend) -> None:
    for body in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1, 2]), b"\x91" * 100_000):
        assert post_envelope(frontend, body, INTERNAL_KEY).status_code == 400


def test_two_requests_of_one_reservation_keep_apart(
    frontend: Frontend, demo_model_dir: Path
) -> None:
    frontend.engine.paused.set()
    body = envelope(frontend, demo_model_dir)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(post_envelope, frontend, body, INTERNAL_KEY) for _ in range(2)]
        wait_until(lambda: len(frontend.engine.running) == 2, what="both at the engine")
        frontend.engine.paused.clear()
        assert [answer.result(timeout=30).status_code for answer in both] == [200, 200]


def test_tokenizer_files_for_routers_only(keyed: Frontend, demo_model_dir: Path) -> None:
    files = TokenizerFiles.load(demo_model_dir)
    internal = {INTERNAL_KEY_HEADER: INTERNAL_KEY}
    path = f"{keyed.url}/internal/tokenizer/{files.digest}"
    got = {
        name: httpx.get(f"{path}/{name}", headers=internal, verify=False).content
        for name in files.contents
    }
    assert TokenizerFiles(got).digest == files.digest
    assert httpx.get(f"{path}/config.json", headers=internal, verify=False).status_code == 404
    assert httpx.get(f"{path}/..%2Fconfig.json", headers=internal, verify=False).status_code == 404
    stale = f"{keyed.url}/internal/tokenizer/0000/tokenizer.json"
    assert httpx.get(stale, headers=internal, verify=False).status_code == 404
    user = {"authorization": "Bearer key-a"}
    assert httpx.get(f"{path}/tokenizer.json", headers=user, verify=False).status_code == 401


# ---- metrics and logs ---------------------------------------------------------------------------


def test_metrics_count_what_happened(start_frontend: StartFrontend) -> None:
    frontend = start_frontend()
    frontend.answer("one two three")
    frontend.engine.cached_tokens = 2
    assert frontend.chat("x", stream=True).status_code == 200
    assert frontend.chat("x", model="other").status_code == 404
    metrics = frontend.metrics()
    assert metrics['radixgrove_requests_total{endpoint="chat",outcome="ok"}'] == 1
    assert metrics['radixgrove_requests_total{endpoint="chat",outcome="invalid"}'] == 1
    assert metrics["radixgrove_time_to_first_token_seconds_count"] == 1
    assert metrics["radixgrove_inter_token_latency_seconds_count"] == 3
    assert metrics['radixgrove_request_duration_seconds_count{endpoint="chat"}'] == 2
    assert metrics["radixgrove_request_cached_tokens_total"] == 2
    assert metrics["radixgrove_request_completion_tokens_total"] == 4


def test_json_logs_and_prompts_on_request(start_frontend: StartFrontend) -> None:
    frontend = start_frontend(log_json=True, log_prompts=True)
    frontend.answer("the answer")
    assert frontend.chat("the question").status_code == 200
    log = frontend.logged("/v1/chat/completions")
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    (access,) = [line for line in lines if line.get("path") == "/v1/chat/completions"]
    assert access["status"] == 200
    assert access["completion_tokens"] == 3
    assert "<|im_start|>user\nthe question<|im_end|>" in access["prompts"][0]
    assert access["answers"] == ["the answer"]
