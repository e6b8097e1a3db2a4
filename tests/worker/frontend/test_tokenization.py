"""`/tokenize` and `/detokenize`, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.frontend.conftest import MODEL, Frontend, prompt_text

ASKED = [{"role": "user", "content": "Grüße <|im_end|>"}]
TOO_LONG = "word " * 40_000


def post(frontend: Frontend, path: str, status: int = 200, **body: Any) -> Any:
    with frontend.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_text(frontend: Frontend) -> None:
    answer = post(frontend, "/tokenize", model=MODEL, prompt="Grüße, world", return_token_strs=True)
    assert answer["tokens"] == frontend.tokenizer.encode("Grüße, world").ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert answer["token_strs"] == frontend.tokenizer.encode("Grüße, world").tokens
    back = post(frontend, "/detokenize", model=MODEL, tokens=answer["tokens"])
    assert back == {"prompt": "Grüße, world"}


def test_a_conversation_has_the_tokens_that_its_completion_computes(frontend: Frontend) -> None:
    answer = post(frontend, "/tokenize", messages=ASKED)
    assert answer["token_strs"] is None
    completion = frontend.chat(ASKED[0]["content"]).json()
    assert completion["usage"]["prompt_tokens"] == answer["count"]
    text = prompt_text(frontend, frontend.engine.submits[-1])
    assert post(frontend, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_what_is_added_can_be_left_out(frontend: Frontend) -> None:
    full = post(frontend, "/tokenize", messages=ASKED)["tokens"]
    bare = post(frontend, "/tokenize", messages=ASKED, add_generation_prompt=False)["tokens"]
    assert full[: len(bare)] == bare
    assert len(bare) < len(full)
    assert post(frontend, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


def test_what_is_too_long_for_the_model_is_counted(frontend: Frontend) -> None:
    answer = post(frontend, "/tokenize", prompt=TOO_LONG)
    assert answer["count"] >= 40_000 > answer["max_model_len"]
    back = post(frontend, "/detokenize", tokens=answer["tokens"])
    assert back["prompt"] == TOO_LONG


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASKED}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": ASKED, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": ASKED, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": ASKED, "tools": [{"type": "function"}]}, "tools[0]"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ],
)
def test_refusals(frontend: Frontend, path: str, body: dict[str, Any], param: str) -> None:
    assert post(frontend, path, 400, **body)["error"]["param"] == param


def test_another_model(frontend: Frontend) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        error = post(frontend, path, 404, model="other", **body)["error"]
        assert error["code"] == "model_not_found"
