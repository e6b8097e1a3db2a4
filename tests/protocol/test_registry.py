"""What a replica says of itself, to routers of this release and of the one before."""

from __future__ import annotations

import msgspec
import pytest

from radixgrove.protocol.registry import EngineInfo, Registration
from tests.release_0_1 import definitions as old

# As a worker of release 0.1 writes it.
OLD = msgspec.to_builtins(
    old.Registration(
        replica_id="r0",
        service="default",
        url="http://10.0.0.1:8100",
        models=["m"],
        namespace="m\x000\x00bfloat16\x00bfloat16",
        root="0123456789abcdef",
        index_block=32,
        page_size=16,
        tokenizer_digest="d",
        max_model_len=4096,
        max_running=64,
        vocab_size=49152,
        prefill_tokens_per_second=1234.5,
        host_tokens_per_second=99.0,
        kv_tokens=65536,
        device="cpu",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        generation="0011223344556677",
    )
)


def registration(**changes: object) -> Registration:
    found = Registration(
        replica_id="r0",
        service="default",
        url="http://10.0.0.1:8100",
        models=["m"],
        namespace="n",
        root="r",
        index_block=32,
        tokenizer_digest="d",
        engine=EngineInfo(
            page_size=16,
            max_model_len=4096,
            max_running=64,
            vocab_size=49152,
            device="cpu",
            prefill_tokens_per_second=1234.5,
            host_tokens_per_second=99.0,
        ),
        generation="0011223344556677",
    )
    return msgspec.structs.replace(found, **changes)


def test_it_comes_back_as_it_was_written() -> None:
    assert Registration.decode(registration().encode()) == registration()


def test_an_old_workers_registration_is_read() -> None:
    found = Registration.decode(msgspec.json.encode(OLD))
    assert found.engine == registration().engine
    assert (found.replica_id, found.generation) == ("r0", "0011223344556677")
    assert found.identity()["index_block"] == 32


def test_an_old_router_reads_what_it_used_to_read() -> None:
    read = msgspec.json.decode(registration().encode(), type=old.Registration)
    facts = registration().engine
    for name in ("page_size", "max_model_len", "max_running", "vocab_size", "device"):
        assert getattr(read, name) == getattr(facts, name), name
    assert read.prefill_tokens_per_second == facts.prefill_tokens_per_second
    assert read.host_tokens_per_second == facts.host_tokens_per_second
    assert read.generation == registration().generation


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"{}",
        b'"\xff"',
        registration(url="ftp://host").encode(),
        registration(url="http://").encode(),
        registration(url="http://host:port").encode(),
        registration(url="http://[half").encode(),
        registration(models=[]).encode(),
        registration(index_block=24).encode(),
        msgspec.json.encode({**OLD, "page_size": 0}),
        msgspec.json.encode({**OLD, "max_model_len": "long"}),
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Registration.decode(data)
