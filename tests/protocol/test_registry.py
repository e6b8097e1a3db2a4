"""What a replica says of itself, to routers of this release and of the one before."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.foreign import decode_json
from radixgrove.protocol.model_table import Demand, ModelTable
from radixgrove.protocol.registry import EngineInfo, Lease, Measured, Registration, member_id
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
        b'{"engine": ' + b"[" * 100_000,
        msgspec.json.encode({**OLD, "max_running": 1 << 63}),
        msgspec.json.encode({**OLD, "prefill_tokens_per_second": -1.0}),
        registration().encode().replace(b"1234.5", b"1e999"),
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Registration.decode(data)


def test_a_replica_of_release_0_1_is_a_group_of_its_own() -> None:
    found = Registration.decode(msgspec.json.encode(OLD))
    assert (found.group, found.dp_rank, found.dp) == ("r0", 0, 1)


def test_members_of_a_group_have_ids_made_of_its_name() -> None:
    member = registration(replica_id=member_id("g", 1, 2), group="g", dp_rank=1, dp=2)
    found = Registration.decode(member.encode())
    assert (found.replica_id, found.group, found.dp_rank) == ("g/1", "g", 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": "listed"}, "'r0' is not member 0 of 'listed'"),
        ({"replica_id": "g/1", "group": "g", "dp": 2}, "'g/1' is not member 0 of 'g'"),
        ({"replica_id": "g/2", "group": "g", "dp": 2, "dp_rank": 2}, "none of 2 members"),
        ({"replica_id": "g/-1", "group": "g", "dp": 2, "dp_rank": -1}, "none of 2 members"),
    ],
)
def test_a_replica_under_the_name_of_another_group_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Registration.decode(registration(**changes).encode())


@given(
    st.binary(max_size=80)
    | st.tuples(st.floats(), st.integers(0, 2), st.floats(), st.floats(), st.floats()).map(
        lambda head: struct.pack("<dBIIIIIddd", head[0], head[1], 1, 2, 3, 4, 5, *head[2:])
    )
)
def test_a_lease_is_read_or_refused(data: bytes) -> None:
    """Redis holds what the pods of all namespaces write."""
    with contextlib.suppress(ValueError):
        Lease.unpack(data)


@given(st.binary(max_size=40) | st.integers(0, 100_000).map(lambda depth: b"[" * depth))
def test_json_of_others_is_read_or_refused(data: bytes) -> None:
    for kind in (Measured, Demand, ModelTable, dict[str, object]):
        with contextlib.suppress(ValueError):
            decode_json(data, kind)
