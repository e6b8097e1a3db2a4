"""An agent's turns through an engine: 40 KB with nine tools, a call, and what it gave."""

from __future__ import annotations

from pathlib import Path

from radixgrove.protocol.openai.sampling import SamplingParams
from tests.e2e.inprocess import InProcessEngine, build, settings
from tests.protocol.text.test_agents import OPENING, called, encoder_of, ids_of
from tests.worker.execution import tiny
from tests.worker.frontend.tool_model import TEMPLATE

LONGEST = 1 << 14
SIZES = {
    "vocab_size": 50_000,  # more than the demo model's tokenizer has
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
}


def test_a_turn_computes_little_but_what_is_new(demo_model_dir: Path, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, **SIZES)
    encoder = encoder_of(demo_model_dir, TEMPLATE)
    worker = settings(max_model_len=LONGEST, kv_tokens=2 * LONGEST, max_running=2)
    engine = InProcessEngine(build(worker, tmp_path), worker)
    turn, before = OPENING, 0
    for number in range(3):
        prompt = ids_of(encoder, turn)
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=8, seed=0, temperature=0))
        assert answer.cached_tokens is not None
        assert answer.cached_tokens >= 0.95 * before
        turn, before = [*turn, *called(number)], len(prompt)
    assert before > 8000
