"""What names a cached block: any difference in what the KV was made from or kept as."""

from __future__ import annotations

import struct
from pathlib import Path

from radixgrove.protocol.registry import root_fingerprint
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.cache.identity import block_hasher, cache_namespace

IDS = struct.pack("<16i", *range(16))


def hashes(dtype: str, kv_dtype: str, **changes: object) -> bytes:
    settings = WorkerSettings.model_validate({"served_model_name": ["m"], **changes})
    return block_hasher(settings, cache_namespace(settings, dtype, kv_dtype)).chain(IDS)


def test_replicas_share_blocks_only_of_the_same_model_version_and_dtypes() -> None:
    chains = [
        hashes("bfloat16", "bfloat16"),
        hashes("bfloat16", "fp8_e4m3"),
        hashes("float16", "fp8_e4m3"),
        hashes("float16", "float16"),
        hashes("bfloat16", "bfloat16", weight_version="1"),
        hashes("bfloat16", "bfloat16", served_model_name=["n"]),
        hashes("bfloat16", "bfloat16", cluster_secret="s"),
    ]
    assert len(set(chains)) == len(chains)
    assert hashes("bfloat16", "fp8_e4m3") == chains[1]


def test_parts_of_a_namespace_do_not_run_into_each_other() -> None:
    assert hashes("ab", "c") != hashes("a", "bc")


def test_a_registration_tells_routers_the_kvs_dtype(demo_model_dir: Path) -> None:
    from radixgrove.worker.agent.registration import describe
    from radixgrove.worker.messages import EngineInfo
    from radixgrove.worker.runtime import Runtime

    settings = WorkerSettings.model_validate(
        {"served_model_name": ["m"], "replica_id": "r", "advertise_url": "http://h:1"}
    )
    runtime = Runtime(demo_model_dir, settings, demo_model_dir)
    registered = [
        describe(
            runtime,
            EngineInfo(
                num_pages=1,
                page_size=16,
                max_model_len=16,
                max_running=1,
                vocab_size=9,
                dtype="bfloat16",
                device="cpu",
                weights_bytes=1,
                kv_bytes_per_token=1,
                attention_backend="torch",
                prefill_tokens_per_second=1.0,
                kv_dtype=kv_dtype,
            ),
        )
        for kv_dtype in ("bfloat16", "fp8_e4m3")
    ]
    assert [item.engine.kv_dtype for item in registered] == ["bfloat16", "fp8_e4m3"]
    assert registered[0].namespace != registered[1].namespace
    assert registered[0].root != registered[1].root
    assert registered[0].identity() == registered[1].identity(), "both may serve the same clients"
    engines = block_hasher(settings, cache_namespace(settings, "bfloat16", "fp8_e4m3"))
    assert registered[1].root == root_fingerprint(engines)
