"""What names a cached block across a cluster: namespace, index block and secret of one worker.

The engine hashes with these and the agent registers them, so that routers hash alike.
"""

from __future__ import annotations

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.settings import Quantize, WorkerSettings, reveal

# A finer index costs Redis more members than its precision is worth.
_SMALLEST_INDEX_BLOCK = 16


def cache_namespace(settings: WorkerSettings, dtype: str, kv_dtype: str) -> str:
    """Model, weight version, dtypes of weights and KV; framed so that no two of these collide."""
    if settings.quantize is not Quantize.NONE:
        dtype = f"{dtype} {settings.quantize.value}"
    parts = (settings.served_model_name[0], settings.weight_version, dtype, kv_dtype)
    return "".join(f"{len(part)}:{part}," for part in parts)


def index_block(settings: WorkerSettings) -> int:
    """Tokens of an index block: as set, else the smallest multiple of the page from 16 on."""
    page = settings.page_size
    return settings.index_block or -(-_SMALLEST_INDEX_BLOCK // page) * page


def block_hasher(settings: WorkerSettings, namespace: str) -> BlockHasher:
    """The hasher that this worker and its routers share."""
    secret = reveal(settings.cluster_secret) or ""
    return BlockHasher(secret.encode(), namespace, index_block(settings))
