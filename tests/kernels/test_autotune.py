"""The tuner: what it measures, takes and keeps; and products by each of its choices."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import autotune, cublaslt, matmul, timing
from radixgrove.kernels.autotune import LinearTuner
from radixgrove.kernels.compilers import Room
from radixgrove.kernels.cublaslt import CublasLt, CublasLtConfig, CublasLtError
from radixgrove.kernels.gemv import GemvConfig
from radixgrove.kernels.linear import linear_reference
from radixgrove.kernels.linear_candidates import (
    BUCKETS,
    GEMV_CANDIDATES,
    Projection,
    bucket_of,
    candidates,
)
from radixgrove.kernels.matmul import CUBLAS, Choice, Scratch, multiply
from radixgrove.kernels.skinny import SkinnyConfig, SkinnyWorkspace
from radixgrove.kernels.weight import Weight
from tests.kernels.helpers import assert_close

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
ROOM = Room(cores=1, memory=0)
ALGORITHM = CublasLtConfig(bytes(range(64)))
CHOICES = [
    CUBLAS,
    Choice(gemv=GemvConfig(rows=2, block_k=512, warps=8)),
    Choice(skinny=SkinnyConfig(block_n=128, splits=2)),
    Choice(cublaslt=ALGORITHM),
    Choice(cublaslt=ALGORITHM, deferred=True),
]


def projection(n: int, k: int, **options: Any) -> Projection:
    return Projection([Weight.plain(torch.zeros(n, k, dtype=torch.bfloat16))], **options)


class TestFile:
    def test_reads_what_it_wrote(self, tmp_path: Path) -> None:
        known = {
            ("bfloat16", 16 << i, 64, 32, i % 2 == 1): choice for i, choice in enumerate(CHOICES)
        }
        path = tmp_path / "new" / "linear.json"
        autotune._write(path, known)
        assert autotune._read(path) == known
        assert [file.name for file in path.parent.iterdir()] == ["linear.json"]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda entry: entry.pop("deferred"),
            lambda entry: entry.update(cublaslt="00" * 63),
            lambda entry: entry.update(cublaslt="no hexadecimal"),
            lambda entry: entry.update(skinny={"block": 3}),
            lambda entry: entry.update(tokens=None),
        ],
    )
    def test_a_spoilt_entry_spoils_the_file(
        self, spoil: Callable[[dict[str, Any]], None], tmp_path: Path
    ) -> None:
        path = tmp_path / "linear.json"
        first, second = ("bfloat16", 1, 2, 3, False), ("bfloat16", 16, 2, 3, False)
        autotune._write(path, {first: CHOICES[3], second: CHOICES[1]})
        entries = json.loads(path.read_text())
        spoil(entries[0])
        path.write_text(json.dumps(entries))
        assert autotune._read(path) == {}

    @pytest.mark.parametrize("text", ["", "{", "null", "3", "[3]", '{"tokens": 1}'])
    def test_something_else_counts_as_empty(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "linear.json"
        path.write_text(text)
        assert autotune._read(path) == {}
        assert autotune._read(tmp_path / "absent.json") == {}

    def test_is_one_devices_and_one_librarys(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("RADIXGROVE_CACHE_DIR", str(tmp_path))
        versions, names = {"v": 130100}, {"n": "H100"}
        monkeypatch.setattr(cublaslt, "version", lambda: versions["v"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names["n"])

        def path(dtype: torch.dtype = torch.bfloat16) -> Path:
            return autotune._cache_path(torch.device("cuda", 0), dtype)

        first = path()
        assert first.parent == tmp_path
        assert path() == first
        assert path(torch.float16) != first
        versions["v"] = 130200
        assert path() != first
        versions["v"], names["n"] = 130100, "H200"
        assert path() != first


class TestChoose:
    @pytest.mark.parametrize(
        ("tokens", "bucket"),
        [(1, 1), (2, 16), (16, 16), (17, 32), (129, 192), (257, 384), (8192, 8192), (9000, 8192)],
    )
    def test_takes_the_next_larger_bucket(self, tokens: int, bucket: int) -> None:
        tuner = LinearTuner()
        weight = Weight.plain(torch.zeros(64, 32, dtype=torch.bfloat16))
        tuner._choices[torch.bfloat16, ("bfloat16", bucket, 64, 32, False)] = CHOICES[3]
        assert tuner.choose(tokens, weight, silu=False) == CHOICES[3]
        untuned = GEMV_CANDIDATES[2] if tokens == 1 else CUBLAS
        assert tuner.choose(tokens, weight, silu=True) == untuned
        others = (
            Weight.plain(weight.payload.half()),
            Weight.plain(weight.payload.t()),
            Weight(weight.payload.to(torch.float8_e4m3fn), weight.dtype),
        )
        for other in others:
            assert tuner.choose(tokens, other, silu=False) == untuned

    def test_no_tokens_need_no_kernel_of_ours(self) -> None:
        tuner = LinearTuner()
        assert tuner.choose(0, Weight.plain(torch.zeros(64, 32)), silu=False) == CUBLAS


class TestTune:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
        """What a tuner without a device measures, as (bucket, N); every choice is the same."""
        measured: list[tuple[int, int]] = []

        def fastest(bucket: int, projection: Projection, scratch: object) -> Choice:
            measured.append((bucket, projection.weights[0].shape[0]))
            return CHOICES[3]

        monkeypatch.setattr(autotune, "_fastest", fastest)
        monkeypatch.setattr(autotune, "_is_tunable", lambda device, dtype: True)
        monkeypatch.setattr(autotune, "_cache_path", lambda *_: tmp_path / "linear.json")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(LinearTuner, "scratch", lambda self, device: None)
        return measured

    def test_measures_what_steps_come_to_once(self, measured: list[tuple[int, int]]) -> None:
        layer, head = projection(64, 32), projection(512, 32, every_token=False)
        messages: list[tuple[str, float]] = []
        tuner = LinearTuner()
        tuner.tune([layer, head], 40, 1500, lambda *args: messages.append(args))
        assert [b for b, n in measured if n == 64] == [b for b in BUCKETS if b <= 2048]
        assert [b for b, n in measured if n == 512] == [1, 16, 32, 64]
        fractions = [done for _, done in messages]
        assert fractions == sorted(fractions)
        assert len(fractions) == len(measured)
        assert max(fractions) < 1
        assert tuner.choose(1025, layer.weights[0], silu=False) == CHOICES[3]

        measured.clear()
        again = LinearTuner()
        again.tune([layer, head], 64, 2048)
        assert measured == []
        assert again.choose(64, head.weights[0], silu=False) == CHOICES[3]
        again.tune([layer, head], 64, 2049)
        assert measured == [(4096, 64)]

    def test_leaves_a_cpu_and_float32_alone(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("RADIXGROVE_CACHE_DIR", str(tmp_path))
        tuner = LinearTuner()
        with tuner.compiling([projection(64, 32)], 8, 8, ROOM):
            tuner.tune([projection(64, 32)], 8, 8)
        assert not tuner._choices
        assert not list(tmp_path.iterdir())


class TestFastest:
    """With times from a table in place of a device."""

    @pytest.fixture
    def race(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Choice]:
        def race(times: dict[Choice, float]) -> Choice:
            self.replays: Counter[Choice] = Counter()
            now = 0.0

            def replay(choice: Choice) -> float:
                nonlocal now
                self.replays[choice] += 1
                now += times[choice]
                return times[choice]

            class Event:
                def record(self) -> None:
                    self.at = now

                def elapsed_time(self, end: Event) -> float:
                    return end.at - self.at

            def record(warm_up: Any, run: Any, device: object, pool: object) -> Any:
                (choice,) = run.args
                if times[choice] < 0:
                    raise RuntimeError("cannot be built")
                return SimpleNamespace(replay=lambda: replay(choice), choice=choice)

            monkeypatch.setattr(autotune, "candidates", lambda *_: list(times))
            monkeypatch.setattr(timing, "_record", record)
            monkeypatch.setattr(timing, "_replay", lambda graph: graph.replay())
            monkeypatch.setattr(timing, "_timing_event", Event)
            monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
            monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
            return autotune._fastest(16, projection(64, 32), None)  # type: ignore[arg-type]

        return race

    def test_the_fastest_wins_and_the_hopeless_are_dropped(
        self, race: Callable[..., Choice]
    ) -> None:
        _, broken, slow, fast, faster = CHOICES
        assert race({CUBLAS: 2.0, broken: -1.0, slow: 1.5, fast: 1.1, faster: 1.0}) == faster
        assert self.replays[slow] < self.replays[fast] == self.replays[faster]

    def test_noise_does_not_choose(self, race: Callable[..., Choice]) -> None:
        assert race({CUBLAS: 1.0, CHOICES[3]: 0.99}) == CUBLAS
        assert race({CUBLAS: 1.0, CHOICES[3]: 0.98}) == CHOICES[3]

    def test_cublas_has_to_work(self, race: Callable[..., Choice]) -> None:
        with pytest.raises(RuntimeError, match="cannot be built"):
            race({CUBLAS: -1.0, CHOICES[3]: 0.99})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scratch of a device of 132 multiprocessors; its cuBLASLt knows two algorithms."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    asked: list[torch.dtype] = []

    def candidates(tokens: int, weight: Tensor, result: torch.dtype) -> list[CublasLtConfig]:
        asked.append(result)
        return [ALGORITHM, ALGORITHM]

    library = SimpleNamespace(candidates=candidates, asked=asked)
    workspace = SkinnyWorkspace(torch.device("cpu"))
    return SimpleNamespace(skinny=workspace, cublaslt=library)


class TestCandidates:
    def test_one_token_is_for_gemv(self, hopper: Any) -> None:
        assert candidates(1, projection(64, 14336), hopper) == [CUBLAS, *GEMV_CANDIDATES]
        (_, *narrow) = candidates(1, projection(64, 32), hopper)
        assert {c.gemv.block_k for c in narrow if c.gemv} == {512, 1024, 2048}

    @pytest.mark.parametrize(("n", "splits"), [(1024, 4), (4096, 2), (6144, 1), (128256, 1)])
    def test_few_tokens_split_k_until_the_chip_is_full(
        self, n: int, splits: int, hopper: Any
    ) -> None:
        found = candidates(32, projection(n, 32), hopper)
        assert found[:3] == [CUBLAS, Choice(cublaslt=ALGORITHM), Choice(cublaslt=ALGORITHM)]
        ours = [choice for choice in found[3:] if choice.skinny]
        assert [choice.skinny.splits for choice in ours if choice.skinny] == [splits]

    def test_our_kernels_end_where_libraries_are_better(self, hopper: Any) -> None:
        def ours(bucket: int, **options: Any) -> list[tuple[int, int]]:
            found = candidates(bucket, projection(8192, 32, **options), hopper)
            own = [choice.skinny for choice in found if choice.skinny is not None]
            return [(config.block_k, config.splits) for config in own]

        assert ours(64) == ours(64, residual=True) == [(128, 1)]
        assert ours(32, silu=True) == [(128, 2)]
        assert ours(64, silu=True) == [(128, 2), (128, 1), (64, 2), (64, 1)]
        assert ours(96) == ours(96, residual=True) == []
        assert ours(128, silu=True) == [(64, 2), (64, 1)], "wider tiles have no room"
        assert ours(192, silu=True) == []

    @pytest.mark.parametrize(
        ("options", "result"),
        [
            ({}, torch.bfloat16),
            ({"wide": True}, torch.float32),
            ({"residual": True}, torch.bfloat16),
        ],
    )
    def test_algorithms_are_asked_for_by_what_they_write(
        self, options: dict[str, bool], result: torch.dtype, hopper: Any
    ) -> None:
        assert len(candidates(64, projection(6144, 32, **options), hopper)) >= 3
        assert hopper.cublaslt.asked == [result]

    def test_many_tokens_may_leave_the_residual_to_the_norm(self, hopper: Any) -> None:
        found = candidates(512, projection(64, 32, residual=True), hopper)
        assert [choice.deferred for choice in found] == [False] * 3 + [True] * 3
        assert found[3] == Choice(deferred=True)
        for other in (
            candidates(512, projection(64, 32), hopper),
            candidates(256, projection(64, 32, residual=True), hopper),
            candidates(512, projection(64, 32, residual=True, biased=True), hopper),
        ):
            assert not any(choice.deferred for choice in other)

    def test_no_algorithms_with_a_bias_or_without_the_library(self, hopper: Any) -> None:
        biased = projection(64, 32, biased=True)
        assert candidates(512, biased, hopper) == [CUBLAS]
        hopper.cublaslt = None
        assert candidates(512, projection(64, 32), hopper) == [CUBLAS]


class TestCompiling:
    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch, hopper: Any, tmp_path: Path) -> list[Any]:
        """What is compiled without a device, as (bucket, choice)."""
        compiled: list[Any] = []

        def submit(executor: object, jobs: list[Any], device: object) -> None:
            for job in jobs:  # a trial's `run_once`, with what it runs
                trial = getattr(job, "func", None)
                compiled.append(job if trial is None else (trial.__self__._tokens, *job.args))

        monkeypatch.setattr(autotune, "_submit", submit)
        monkeypatch.setattr(autotune, "_is_tunable", lambda device, dtype: True)
        monkeypatch.setattr(autotune, "_cache_path", lambda *_: tmp_path / "linear.json")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(LinearTuner, "scratch", lambda self, device: hopper)
        return compiled

    def test_each_kernel_once_and_nothing_that_is_known(
        self, compiled: list[Any], tmp_path: Path
    ) -> None:
        layer, twin = projection(6144, 14336), projection(8192, 14336)
        with LinearTuner().compiling([layer, twin], 64, 64, ROOM):
            small = [1] * len(GEMV_CANDIDATES)
            assert [bucket for bucket, _ in compiled] == [*small, 16, 32, 64]
        compiled.clear()
        known = {kind.key(1): CUBLAS for kind in (layer, twin)}
        autotune._write(tmp_path / "linear.json", known)
        with LinearTuner().compiling([layer, twin], 64, 64, ROOM):
            assert [bucket for bucket, _ in compiled] == [16, 32, 64]

    def test_a_gemv_that_takes_all_of_k_at_once_is_another(self, compiled: list[Any]) -> None:
        with LinearTuner().compiling([projection(64, 14336), projection(64, 4096)], 1, 1, ROOM):
            again = [choice for _, choice in compiled[len(GEMV_CANDIDATES) :]]
        assert again == [one for one in GEMV_CANDIDATES if one.gemv and one.gemv.block_k == 4096]

    def test_what_a_library_leaves_to_kernels_of_their_own_is_compiled(
        self, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []
        monkeypatch.setattr(autotune, "add_rms_norm", lambda *_: ran.append("norm"))
        monkeypatch.setattr(autotune, "silu_and_mul", lambda x: ran.append("silu"))
        kinds = [projection(64, 32, residual=True), projection(64, 32, silu=True)]
        with LinearTuner().compiling([*kinds, projection(64, 32)], 1, 1, ROOM):
            for job in compiled:
                if callable(job):
                    job()
        assert sorted(ran) == ["norm", "silu"]

    def test_processes_help_for_which_there_is_room(
        self, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        helping: list[tuple[int, bool]] = []

        @contextmanager
        def compiling_apart(device: torch.device, count: int, *, at_once: bool) -> Iterator[None]:
            assert not compiled
            helping.append((count, at_once))
            yield
            helping.clear()

        monkeypatch.setattr(autotune, "compiling_apart", compiling_apart)
        with LinearTuner().compiling([projection(64, 32)], 1, 1, Room(cores=8, memory=1 << 30)):
            assert helping == [(4, True)], "some product has never been measured"
            assert compiled
        assert not helping
        autotune._write(tmp_path / "linear.json", {projection(64, 32).key(1): CUBLAS})
        compiled.clear()
        with LinearTuner().compiling([projection(64, 32)], 1, 1, Room(cores=8, memory=1 << 30)):
            assert helping == [(4, False)]

    def test_other_kernels_come_first(self, compiled: list[Any]) -> None:
        def other() -> None: ...

        with LinearTuner().compiling([projection(6144, 14336)], 1, 1, ROOM, [other]):
            assert compiled[0] is other
            assert len(compiled) == 1 + len(GEMV_CANDIDATES)


def test_when_loading_fails_what_is_being_compiled_ends_and_the_rest_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Choice] = []
    failed = threading.Event()
    shut_down = ThreadPoolExecutor.shutdown

    def shutdown(executor: ThreadPoolExecutor, wait: bool = True, **options: bool) -> None:
        shut_down(executor, wait=False, **options)
        failed.set()
        shut_down(executor, wait=wait)

    def run_once(trial: object, choice: Choice) -> None:
        assert failed.wait(30)
        ran.append(choice)
        raise RuntimeError("cannot be built")

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(autotune._Trial, "run_once", run_once)
    monkeypatch.setattr(autotune, "_is_tunable", lambda device, dtype: True)
    monkeypatch.setattr(autotune, "_cache_path", lambda *_: Path("absent"))
    monkeypatch.setattr(LinearTuner, "scratch", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def load() -> None:
        with LinearTuner().compiling([projection(64, 32)], 1, 1, ROOM):
            raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        load()
    assert ran == [GEMV_CANDIDATES[0]]
    assert not [t for t in threading.enumerate() if t.name.startswith("compile-kernels")]


class TestLibrary:
    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cublaslt, "_library", lambda: None)
        assert cublaslt.version() is None
        assert CublasLt.open(torch.device("cuda", 0)) is None

    @pytest.mark.skipif(ON_GPU or cublaslt.version() is None, reason="needs the library alone")
    def test_without_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        with pytest.raises(CublasLtError, match="status 1"):
            CublasLt(torch.device("cuda", 0))
        assert CublasLt.open(torch.device("cuda", 0)) is None

    @pytest.mark.skipif(cublaslt.version() is None, reason="needs the library")
    def test_layouts_follow_the_token_count(self) -> None:
        from ctypes import byref, c_int, c_size_t, c_uint64

        library = cublaslt._library()
        assert library is not None
        product = cublaslt._Product(library, 128, 64, torch.bfloat16, torch.float32)

        def read(layout: Any) -> list[int]:
            values = []
            # Type, rows, columns, leading dimension; their bytes.
            for attribute, length in ((0, 4), (2, 8), (3, 8), (4, 8)):
                value, size = c_uint64(), c_size_t(length)
                arguments = layout.pointer, c_int(attribute), byref(value), size, byref(size)
                assert library.cublasLtMatrixLayoutGetAttribute(*arguments) == 0
                values.append(value.value)
            return values

        for tokens in (5, 7, 1):
            product.set_tokens(tokens)
            assert read(product.weight) == [14, 64, 128, 64]
            assert read(product.x) == [14, 64, tokens, 64]
            assert read(product.out) == [0, 128, tokens, 128]

    def test_an_algorithm_has_64_bytes(self) -> None:
        with pytest.raises(ValueError, match="64 bytes"):
            CublasLtConfig(bytes(63))


class _Refusing:
    """cuBLASLt which can do nothing."""

    asked = 0

    def matmul(self, *args: object, **options: object) -> Tensor:
        self.asked += 1
        raise CublasLtError("no")


@pytest.mark.parametrize("ending", ["plain", "residual", "out", "silu", "bias"])
def test_refused_algorithms_leave_it_to_torch(ending: str, device: torch.device) -> None:
    x, weight = torch.randn(3, 32, device=device), torch.randn(40, 32, device=device)
    options: dict[str, Any] = {"silu": ending == "silu"}
    if ending == "residual":
        options["residual"] = torch.randn(3, 40, device=device)
    expected = linear_reference(
        x, weight, **{name: v.clone() if name == "residual" else v for name, v in options.items()}
    )
    bias = None
    if ending == "bias":
        bias = torch.randn(40, device=device)
        expected += bias
    if ending == "out":
        options["out"] = torch.empty(3, 40, device=device)
    library = _Refusing()
    scratch: Any = SimpleNamespace(cublaslt=library, skinny=None)
    y = multiply(x, Weight.plain(weight), bias, choice=CHOICES[3], scratch=scratch, **options)
    assert_close(y, expected)
    assert library.asked == (ending != "bias")
    for name in ("out", "residual"):
        assert name not in options or y is options[name]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
class TestOnDevice:
    N, K = 512, 1024

    @pytest.fixture(scope="class")
    def scratch(self) -> Scratch:
        return Scratch(torch.device("cuda", 0))

    def choices(self, tokens: int, scratch: Scratch, **options: Any) -> list[Choice]:
        weight = torch.zeros(self.N, self.K, dtype=torch.bfloat16, device="cuda")
        found = candidates(tokens, Projection([Weight.plain(weight)], **options), scratch)
        assert len(found) > 1
        return found

    @pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
    @pytest.mark.parametrize("ending", ["plain", "residual", "out", "silu", "wide out"])
    @pytest.mark.parametrize("tokens", [1, 16, 96, 200, 512])
    def test_every_candidate_computes_the_product(
        self, tokens: int, ending: str, captured: bool, scratch: Scratch
    ) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda").to(torch.bfloat16)

        x, weight, norm = random(tokens, self.K), random(self.N, self.K) / 32, random(self.K)
        silu = ending == "silu"
        width = self.N // 2 if silu else self.N
        dtype = torch.float32 if ending == "wide out" else x.dtype
        name = ending.removeprefix("wide ")
        start = random(tokens, width) if name == "residual" else None
        wide = torch.float64
        exact = linear_reference(
            x.to(wide),
            weight.to(wide),
            norm=norm.to(wide),
            silu=silu,
            residual=None if start is None else start.to(wide),
        )
        kind = {"silu": silu, "residual": start is not None, "wide": ending == "wide out"}
        for choice in self.choices(tokens, scratch, **kind):
            target = torch.full((tokens, width), float("nan"), dtype=dtype, device="cuda")
            options: dict[str, Any] = {"choice": choice, "scratch": scratch, "silu": silu}
            if name in ("residual", "out"):
                options[name] = target

            def run(options: dict[str, Any] = options) -> Tensor:
                return multiply(x, Weight.plain(weight), norm=norm, **options)

            def restart(target: Tensor = target) -> None:
                target.copy_(start) if start is not None else target.fill_(float("nan"))

            restart()
            y = run()
            if captured:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = run()
                restart()
                graph.replay()
            assert_close(y, exact, 2e-2)
            assert y.dtype == dtype
            assert name not in ("residual", "out") or y is target

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_algorithms_serve_other_token_counts_or_say_no(self, dtype: torch.dtype) -> None:
        library = CublasLt(torch.device("cuda", 0))
        weight = torch.randn(self.N, self.K, device="cuda").to(dtype) / 32
        configs = library.candidates(256, weight, dtype)
        assert configs
        served = 0
        for tokens in (256, 255, 130, 17, 256):
            x = torch.randn(tokens, self.K, device="cuda").to(dtype)
            for config in configs:
                try:
                    y = library.matmul(x, weight, config)
                except CublasLtError:
                    continue
                served += 1
                assert_close(y, x.double() @ weight.double().t(), 1e-2)
        assert served >= 2 * len(configs)

    def test_refuses_operands_that_are_not_aligned(self) -> None:
        library = CublasLt(torch.device("cuda", 0))
        weight = torch.zeros(self.N, self.K, dtype=torch.bfloat16, device="cuda")
        (config, *_) = library.candidates(16, weight, weight.dtype)
        shifted = weight.new_zeros(16 * self.K + 8)[8:].view(16, self.K)
        with pytest.raises(CublasLtError, match="aligned"):
            library.matmul(shifted, weight, config)

    def test_a_tuned_model_uses_its_choices(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("RADIXGROVE_CACHE_DIR", str(tmp_path))
        matrices = [torch.randn(512, 1024, device="cuda").to(torch.bfloat16) for _ in range(3)]
        weights = [Weight.plain(matrix) for matrix in matrices]
        kinds = [Projection(weights), Projection(weights, silu=True)]
        tuner = LinearTuner()
        with tuner.compiling(kinds, 16, 600, ROOM):
            pass
        tuner.tune(kinds, 16, 600)
        (file,) = tmp_path.glob("linear-*.json")
        assert len(autotune._read(file)) == 2 * len([b for b in BUCKETS if b <= bucket_of(600)])
        for tokens in (1, 9, 64, 600):
            x = torch.randn(tokens, 1024, device="cuda").to(torch.bfloat16)
            choice = tuner.choose(tokens, weights[0], silu=False)
            y = multiply(x, weights[0], choice=choice, scratch=tuner.scratch(x.device))
            assert_close(y, x.double() @ matrices[0].double().t())


def test_products_by_torch_are_in_place(device: torch.device) -> None:
    """With no choice at all, `multiply` is torch's own product."""
    x, weight = torch.randn(3, 32, device=device), torch.randn(40, 32, device=device)
    residual = torch.randn(3, 40, device=device)
    expected = residual + x @ weight.t()
    scratch: Any = SimpleNamespace(cublaslt=None, skinny=None)
    y = matmul.multiply(x, Weight.plain(weight), choice=CUBLAS, scratch=scratch, residual=residual)
    assert y is residual
    assert_close(y, expected)
