"""A router makes tokens of texts with its replicas' tokenizer."""

from __future__ import annotations

from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, prompt


async def test_tokens_of_a_text_and_back(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    text = prompt(1, 2)
    answer = await router.post("/tokenize", {"model": MODEL, "prompt": text})
    assert answer.json["count"] == len(answer.json["tokens"]) == 32
    back = await router.post("/detokenize", {"tokens": answer.json["tokens"]})
    assert back.json["prompt"].split() == text.split()  # this tokenizer has no decoder
    other = await router.post("/tokenize", {"model": "other", "prompt": text})
    assert (other.status, other.error["code"]) == (404, "model_not_found")
    asked = [{"role": "user", "content": "hi"}]
    chat = await router.post("/tokenize", {"model": MODEL, "messages": asked})
    assert chat.json["count"] > 0


async def test_servers_without_a_tokenizer(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    router = await make_router(ready=False)
    nowhere = await router.post("/tokenize", {"prompt": "hi"})
    assert (nowhere.status, nowhere.error["param"]) == (400, "model")
    replica = await make_replica()
    foreign = await make_router(replicas=[f"{MODEL}={replica.url}"])
    answer = await foreign.post("/tokenize", {"model": MODEL, "prompt": "hi"})
    assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")
