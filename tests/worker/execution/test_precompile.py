"""What is compiled ahead of steps is what they launch, where ranks have whole logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixgrove.kernels import decode_inputs, ops, pages, penalties, sample, top_k_top_p
from radixgrove.worker.execution.precompile import step_jobs
from radixgrove.worker.execution.sampling.draw import draw_by_kernels
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable

KERNELS = {
    "_gather_rows_kernel": (decode_inputs, set()),
    "_kv_indices_kernel": (pages, {"batch"}),
    "_penalize_kernel": (penalties, set()),
    "_race_kernel": (sample, set()),
    "_race_winner_kernel": (sample, {"parts", "dummy_row"}),
    "_thresholds_kernel": (top_k_top_p, set()),
}
KNOWN, LONGEST, PAGE, HIDDEN, ROWS = 1000, 4096, 16, 64, 40
Launches = set[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernel, constants, types and specialised integers of what is launched; nothing runs."""
    seen: Launches = set()

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

    class Recorder:
        def __init__(self, name: str, varying: set[str], kernel: Any) -> None:
            self.name, self.varying = name, varying
            self.names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*values: Any, **constants: Any) -> None:
                named = zip(self.names, values, strict=False)
                kept = (describe(value) for name, value in named if name not in self.varying)
                seen.add((self.name, *kept, *sorted(constants.items())))

            return launch

    for name, (module, varying) in KERNELS.items():
        monkeypatch.setattr(module, name, Recorder(name, varying, getattr(module, name)))
    # On a CPU these are the references.
    for module in (decode_inputs, pages, penalties):
        for name in ("gather_rows", "kv_indices", "penalize"):
            if hasattr(module, name):
                monkeypatch.setattr(ops, name, getattr(module, name))
    return seen


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("padding", [0, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_steps_launch_beside_layers_is_compiled_ahead(
    dtype: torch.dtype, padding: int, windows: bool, launches: Launches
) -> None:
    vocabulary = KNOWN + padding
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        logits_dtype=dtype,
        known_tokens=KNOWN,
        config=SimpleNamespace(vocab_size=vocabulary, hidden_size=HIDDEN),
        embedding=torch.zeros(vocabulary, HIDDEN, dtype=torch.bfloat16),
        stage=SimpleNamespace(has_head=True),
    )
    for job in step_jobs(model, LONGEST, PAGE, windows=windows):
        job()
    compiled = set(launches)
    launches.clear()
    table = RequestTable(
        max_rows=ROWS,
        max_model_len=LONGEST,
        page_size=PAGE,
        scratch_page=9,
        scratch_window_page=9,
        device=model.device,
    )
    state = SamplingState(ROWS, model.device, KNOWN)
    for count in (2, 3, ROWS):  # edits of one row alone may keep its stride
        index = torch.zeros(count, dtype=torch.int64)
        narrow = index.int()
        for window_table in (None, table.window_pages) if windows else (None,):
            decode_inputs.gather_rows(
                index, table.lens, table.tokens, table.pages, PAGE,
                narrow, narrow, index, narrow, index,
                model.embedding, torch.zeros(count, HIDDEN, dtype=torch.bfloat16),
                window_table, None if window_table is None else index,
            )  # fmt: skip
        pages.kv_indices(narrow, narrow, table.pages, PAGE, narrow, narrow, narrow)
        logits = torch.zeros(count, vocabulary, dtype=dtype)[:, :KNOWN]
        edited = logits.float() if dtype != torch.float32 else logits.clone()
        counts = torch.zeros(count, KNOWN + 1, dtype=torch.int32)[:, :-1]
        ones = torch.ones(count)
        penalties.penalize(edited, narrow, counts, ones, ones, ones)
        random = SamplingFeatures.RANDOM
        for need in (SamplingFeatures.NOTHING, random, random | SamplingFeatures.FILTER):
            for of in (logits, edited):
                draw_by_kernels(of, index, state, table, need, None)
    assert {name for name, *_ in compiled} == set(KERNELS)
    assert launches == compiled
