"""KV in float8: a fraction of the memory, and one text however the cache was filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import Device, DType, KVDType, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution.choices import choose_kv_dtype
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import EngineInfo, PhaseReport
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy

TOKENS = 24
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def build(directory: Path, **changes: object) -> tuple[EngineInfo, list[str]]:
    """What a small engine says of itself: at the end, and on the way."""
    options = {"device": Device.CPU, "max_running": 4, "max_model_len": 128, "kv_tokens": 1024}
    phases: list[PhaseReport] = []
    settings = WorkerSettings.model_validate({**options, **changes})
    executor, info = build_executor(settings, directory, phases.append)
    executor.close()
    return info, [phase.message for phase in phases]


@pytest.mark.parametrize(("dtype", "share"), [(DType.FLOAT32, 4), (DType.BFLOAT16, 2)])
def test_a_token_takes_one_byte_a_value(dtype: DType, share: int, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    plain, _ = build(tmp_path, dtype=dtype)
    info, messages = build(tmp_path, dtype=dtype, kv_dtype=KVDType.FP8_E4M3)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16
    assert plain.kv_bytes_per_token == share * info.kv_bytes_per_token
    assert (plain.kv_dtype, info.kv_dtype) == (dtype.value, "fp8_e4m3")
    assert info.dtype == dtype.value, "weights keep theirs"
    assert any("in pages of 16 (fp8_e4m3)" in message for message in messages)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_way_to_the_cache_does_not_show_in_the_text(kind: str, tmp_path: Path) -> None:
    """Cold, warm, in chunks, batched, and padded as for graphs: attention always sees K and V as
    float8 holds them, also where they have not been through a page."""
    tiny.save(kind, tmp_path)
    runner = cpu_runner(tmp_path, kv_dtype=KVDType.FP8_E4M3)
    prompts = tiny.prompts()[-4:]

    def texts(**options: object) -> list[list[int]]:
        return [r.tokens for r in Driver(runner).generate(prompts, greedy(TOKENS), **options)]  # type: ignore[arg-type]

    cold = texts()
    assert len({token for text in cold for token in text}) > 8
    assert texts(chunk=7) == cold
    assert [
        Driver(runner).generate([prompt], greedy(TOKENS))[0].tokens for prompt in prompts
    ] == cold
    driver = Driver(runner)
    driver.generate(prompts, greedy(1), reuse=True)
    warm = driver.generate(prompts, greedy(TOKENS), reuse=True)
    assert [result.tokens for result in warm] == cold
    assert sum(result.cached for result in warm) >= 16
    graphs = runner.capture([1, 2, 8], lambda text, done: None)
    assert texts() == cold
    assert graphs.replays == TOKENS - 1


def test_attention_sees_rounded_values(tmp_path: Path) -> None:
    """Otherwise the tests above would say nothing."""
    tiny.save("llama", tmp_path)
    prompt = tiny.prompts()[-1]
    exact, rounded = (
        Driver(cpu_runner(tmp_path, kv_dtype=kind)).generate([prompt], greedy(1, logprobs=3))[0]
        for kind in (KVDType.AUTO, KVDType.FP8_E4M3)
    )
    distance = abs(exact.logprobs[0].logprob - rounded.logprobs[0].logprob)
    assert 1e-4 < distance < 0.5


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Runner:
    return cpu_runner(demo_model_dir, kv_dtype=KVDType.FP8_E4M3, max_model_len=1024)


def test_the_demo_model_answers(demo: Runner, demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(CHAT).ids
    driver = Driver(demo)
    cold = driver.generate([prompt], greedy(8), reuse=True)[0]
    assert tokenizer.decode(cold.tokens).startswith("The capital of France is Paris.")
    warm = driver.generate([prompt], greedy(8), reuse=True)[0]
    assert warm.cached == len(prompt) // 16 * 16
    assert warm.tokens == cold.tokens


def test_the_demo_models_logprobs_stay_near(
    demo: Runner, demo_model_dir: Path, demo_prompts: list[list[int]]
) -> None:
    """Of given texts, without and with a part of them from the cache: on average within a tenth."""
    prompts = [prompt for prompt in demo_prompts if len(prompt) > 20][:6]
    exact = cpu_runner(demo_model_dir, max_model_len=1024)
    sampling = greedy(1, prompt_logprobs=0)
    expected = Driver(exact).generate(prompts, sampling)
    for chunk in (1 << 30, 16):
        found = Driver(demo).generate(prompts, sampling, chunk=chunk)
        distances = [
            abs(ours.logprob - theirs.logprob)
            for a, b in zip(found, expected, strict=True)
            for ours, theirs in zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
        ]
        assert len(distances) > 100
        mean = sum(distances) / len(distances)
        assert 1e-3 < mean < 0.1, mean


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_gpus_that_convert_float8_take_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert choose_kv_dtype(KVDType.FP8_E4M3, torch.bfloat16, device) == FLOAT8
    assert choose_kv_dtype(KVDType.AUTO, torch.bfloat16, device) == torch.bfloat16


def test_older_gpus_refuse_and_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda", 0)
    with pytest.raises(ModelError, match=r"needs .* 8\.9 .* has 8\.0; set kv_dtype to auto"):
        choose_kv_dtype(KVDType.FP8_E4M3, torch.bfloat16, device)
    assert choose_kv_dtype(KVDType.AUTO, torch.float16, device) == torch.float16
