"""The serving benchmark's model: a tokenizer as large as the config says, with real text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from benchmarks.load import serving, worker_process
from radixgrove.worker.frontend.detokenize import Vocabulary

VOCABULARY = 150_000


def test_ids_of_the_synthetic_tokenizer_read_as_distinct_words() -> None:
    content = worker_process.synthetic_tokenizer(VOCABULARY)
    assert content == worker_process.synthetic_tokenizer(VOCABULARY)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert tokenizer.get_vocab_size() == VOCABULARY
    vocabulary = Vocabulary(tokenizer)
    texts = {vocabulary.token_bytes(number).decode() for number in range(256, VOCABULARY)}
    assert len(texts) == VOCABULARY - 256
    assert {len(text) for text in texts} == {2, 3, 4, 5}
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界!").ids) == "Grüße, 世界!"


def test_usage_is_what_came_since() -> None:
    before = worker_process.Usage({"engine": 1.0}, {"radixgrove_engine_steps_total": 10.0})
    phase = 'radixgrove_engine_phase_cpu_seconds_total{phase="launch"}'
    after = worker_process.Usage(
        {"engine": 3.0, "agent": 0.5}, {"radixgrove_engine_steps_total": 20.0, phase: 0.1}
    )
    run = serving.Run({"client cpu": 2.0}, after.since(before))
    assert run.steps == 10
    assert run.cpu_per_step() == pytest.approx(
        {"engine": 200.0, "agent": 50.0, "clients": 200.0, "engine: launch": 10.0}
    )
