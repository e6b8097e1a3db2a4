"""Cache events on their way to the index."""

from __future__ import annotations

from radixgrove.protocol.blocks import HASH_BYTES, BlockHasher, members
from radixgrove.worker.agent.index_feed import MOST_DOMAINS, IndexFeed
from radixgrove.worker.messages import CacheEvent, Tier


def test_domains_come_and_go_without_growth_and_keep_their_names() -> None:
    """A salt is a domain: clients make as many as they like."""
    hasher = BlockHasher(b"secret", "model", 16)
    feed = IndexFeed(hasher, lambda: None)
    block = bytes(range(HASH_BYTES))
    domains = [f"alice#{number}" for number in range(3 * MOST_DOMAINS)]
    operations = []
    for domain in [*domains, domains[0]]:
        (operation,) = feed._operations([CacheEvent(True, Tier.GPU, domain, block)])
        operations.append(operation)
    assert operations[-1] == operations[0] == (b"+gpu", members(block, hasher.domain64(domains[0])))
    assert len(set(operations)) == len(domains)
    assert feed._domain64.cache_info().currsize <= MOST_DOMAINS
