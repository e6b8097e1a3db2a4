"""What a worker tells routers of itself."""

from __future__ import annotations

from radixgrove.protocol.registry import Registration, member_id, root_fingerprint
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.cache.identity import block_hasher, cache_namespace, index_block
from radixgrove.worker.messages import EngineInfo
from radixgrove.worker.runtime import Runtime


def describe(runtime: Runtime, info: EngineInfo, dp_rank: int = 0) -> Registration:
    """What routers learn of a member of this worker.

    Raises:
        TokenizerError: the model's tokenizer files are unusable.
    """
    settings = runtime.settings
    assert settings.replica_id is not None
    assert settings.advertise_url is not None
    files = TokenizerFiles.load(runtime.model_dir, settings)
    namespace = cache_namespace(settings, info.dtype, info.kv_dtype)
    return Registration(
        replica_id=member_id(settings.replica_id, dp_rank, settings.dp),
        group=settings.replica_id,
        dp_rank=dp_rank,
        dp=settings.dp,
        service=settings.service,
        url=settings.advertise_url,
        models=settings.served_model_name,
        namespace=namespace,
        root=root_fingerprint(block_hasher(settings, namespace)),
        index_block=index_block(settings),
        tokenizer_digest=files.digest,
        engine=info,
        sharing=settings.sharing,
        weight_version=settings.weight_version,
        output_format=files.format.name,
        capabilities=files.capabilities,
    )
