"""What it costs that answers obey a schema: decoding free, with one row bound, and with all.

    python -m benchmarks.engine.constrained --model llama-3.1-8b qwen3-0.6b --rows 64 256

A bound row writes a JSON object of strings, one that has room for all its tokens. The three kinds
take turns, and a ratio is the median of those within a round: rates of rows that are alike but for
their masks. Tokens are drawn at temperature 1, so that random weights too lead matchers everywhere.
Models under benchmarks/configs get a byte-level vocabulary made here; what bound rows write is
checked against their grammar before anything is measured.

Beside that: what the host does in a decode step and how long the GPU idles, and how long steps of
free rows take while schemas come that are new and slow to compile (`--cold`), against the same
steps without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks import results
from benchmarks.engine.offline import (
    BenchmarkEngine,
    add_engine_options,
    count_tokens,
    find_model,
    make_settings,
)
from benchmarks.engine.profile_engine import Phases, in_window, run_steps, traced
from benchmarks.engine.workloads import VOCABULARY, Item, Workload
from radixgrove.protocol.constraints.constraint import json_schema
from radixgrove.protocol.constraints.grammar import (
    build_matcher,
    compile_constraint,
    compiler_threads,
)
from radixgrove.protocol.model.directory import CONFIG, read_json
from radixgrove.protocol.token_bytes import byte_characters
from radixgrove.worker.engine.tokenizer import tokenizer_of
from radixgrove.worker.messages import Tokens

KINDS = ("free", "one", "all")
WHITESPACE = 8  # most characters between two tokens of JSON, as by default
_PROPERTIES = 64  # strings that an answer must have: more than it has room for
_COLD_PROPERTIES = 1500  # of a schema that is slow to compile
_CONFIG_BYTES = 1 << 20


# ---- a vocabulary ----------------------------------------------------------------------------


def pieces() -> Iterator[str]:
    """Texts such as a trained vocabulary has, without end, some more than once: blanks, marks and
    pairs of them, numbers, words with and without a blank before them, words of other scripts."""
    marks = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isalnum()]
    yield from (" " * count for count in range(2, 64))
    yield from ("\n" * count + " " * blanks for count in range(1, 5) for blanks in range(17))
    for count in (1, 2):
        for run in itertools.product(marks, repeat=count):
            yield "".join(run)
            yield " " + "".join(run)
    yield from ('": "', '", "', '":"', '","', '"},', '"}', '{"', '"\n', '",\n')
    yield from map(str, range(1000))
    draw = random.Random(0)
    latin, others = "etaoinshrdlucmfwygpbvkxqjz", [*range(0x430, 0x450), *range(0x4E00, 0x5200)]
    while True:
        length = draw.randint(2, 10)
        if draw.random() < 0.15:
            yield "".join(chr(draw.choice(others)) for _ in range(min(length, 3)))
        else:
            word = "".join(draw.choices(latin, weights=range(27, 1, -1), k=length))
            yield draw.choice((word, " " + word, word.capitalize(), " " + word.capitalize()))


def make_tokenizer(config: dict[str, Any]) -> Tokenizer:
    """A tokenizer of a model's vocabulary: no text is cut into its pieces, but any of them may come
    from the model. From the first of the model's special ids on all are special."""
    eos = config["eos_token_id"]
    first_special = min([*(eos if isinstance(eos, list) else [eos]), config["bos_token_id"]])
    characters = byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    for piece in pieces():
        if len(vocabulary) == first_special:
            break
        text = "".join(characters[byte] for byte in piece.encode())
        vocabulary.setdefault(text, len(vocabulary))
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    specials = range(first_special, config["vocab_size"])
    tokenizer.add_special_tokens([f"<|{number}|>" for number in specials])
    return tokenizer


@contextmanager
def with_tokenizer(model_dir: Path) -> Iterator[Path]:
    """The directory, or a copy with a tokenizer where it has none."""
    if (model_dir / "tokenizer.json").exists():
        yield model_dir
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / model_dir.name
        shutil.copytree(model_dir, copy)
        made = make_tokenizer(read_json(copy / CONFIG, _CONFIG_BYTES))
        made.save(str(copy / "tokenizer.json"))
        yield copy


# ---- what rows write -------------------------------------------------------------------------


def object_of_strings() -> dict[str, Any]:
    names = [f"property_{number}" for number in range(_PROPERTIES)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def cold_schema(number: int) -> dict[str, Any]:
    """As many optional properties as take a quarter of a second; each number gives others."""
    kind = {"type": ["integer", "string"]}
    names = [f"property_{number}_{place}" for place in range(_COLD_PROPERTIES)]
    return {"type": "object", "properties": dict.fromkeys(names, kind)}


class Grammars:
    """Schemas as the engine gets them: compiled once before, as frontends do."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = tokenizer_of(model_dir)
        self._threads = compiler_threads(1, "benchmark")

    def of(self, schema: dict[str, Any]) -> tuple[str, float]:
        """The grammar, and the seconds that it took."""
        asked = json_schema(json.dumps(schema).encode(), "schema", strict=True)
        begin = time.perf_counter()
        work = self._threads.submit(compile_constraint, asked, self.tokenizer, WHITESPACE)
        return work.result().grammar, time.perf_counter() - begin

    def follows(self, grammar: str, tokens: list[int]) -> bool:
        """Whether the grammar allows these tokens, one after the other."""
        matcher = self._threads.submit(build_matcher, grammar, self.tokenizer).result()
        return matcher.validate_tokens(tokens) == len(tokens)


def workload(kind: str, rows: int, tokens: int, grammar: str) -> Workload:
    """`rows` requests of 128 tokens in and `tokens` out, of which no, one or each row is bound."""
    bound = {"free": 0, "one": 1, "all": rows}[kind]
    draw = random.Random(0)
    items = []
    for row in range(rows):
        prompt = [draw.randrange(VOCABULARY) for _ in range(128)]
        items.append(Item(prompt, tokens, grammar=grammar if row < bound else None))
    return Workload(f"{kind}_{rows}", items, temperature=1.0)


def check(engine: BenchmarkEngine, grammars: Grammars, asked: Workload) -> None:
    """Raises RuntimeError: a bound row wrote what its grammar forbids, or a free one obeyed it."""
    engine.submit(asked)
    answers: list[list[int]] = [[] for _ in asked.items]
    while engine.scheduler.has_work:
        engine.turn()
        for output in engine.scheduler.take_outputs().get(0, []):
            if not isinstance(output, Tokens):
                raise RuntimeError(f"refused: {output.detail}")
            answers[int(output.request_id)] += output.token_ids
    grammar = asked.items[0].grammar
    assert grammar is not None
    for item, answer in zip(asked.items, answers, strict=True):
        if grammars.follows(grammar, answer) != (item.grammar is not None):
            raise RuntimeError(f"a row wrote {answer[:20]}")


# ---- measuring -------------------------------------------------------------------------------


def compare(
    engine: BenchmarkEngine, kinds: dict[str, Workload], rounds: int
) -> dict[str, list[float]]:
    """Tokens a second of each kind, a figure a round."""
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):  # the first warms up
        for kind, asked in kinds.items():
            rate = asked.output_tokens / engine.run(asked).seconds
            if number:
                rates[kind].append(rate)
    return rates


def step_seconds(engine: BenchmarkEngine, free: Workload, cold: list[str]) -> list[float]:
    """Seconds between the tokens of free rows, while schemas come that the engine has not seen.

    Each comes with a request of its own, evenly over the run, in a row that is there in any case:
    without schemas as many free requests of one token come at the same times.
    """
    engine.scheduler.flush_cache()
    engine.submit(free)
    steps = free.items[0].max_tokens
    arrivals = [steps * (number + 1) // (len(cold) + 1) for number in range(len(cold))]
    found, done, last = [], 0, time.perf_counter()
    while engine.scheduler.has_work:
        if arrivals and done >= arrivals[0]:
            arrivals.pop(0)
            grammar = cold[len(arrivals)] or None
            late = Workload("cold", [Item([1, 2, 3], 1, grammar=grammar)])
            engine.submit(late, len(free.items) + len(arrivals))
        engine.turn()
        now = time.perf_counter()
        if count_tokens(engine.scheduler.take_outputs()) >= len(free.items):
            found.append(now - last)
            done += 1
        last = now
    return found[8:]  # without the prompts


def quantile(seconds: list[float], share: float) -> float:
    """In milliseconds."""
    return float(np.quantile(seconds, share)) * 1e3


class Report:
    """Prints figures, and keeps them."""

    def __init__(self, engine: BenchmarkEngine, model: str) -> None:
        self._common = {
            "benchmark": "constrained",
            "model": model,
            "subject": "radixgrove",
            "dtype": engine.info.dtype,
            "attention_backend": engine.info.attention_backend,
        }

    def add(self, workload: str, metric: str, value: float, unit: str, **more: Any) -> None:
        print(
            f"{self._common['model']:<16}{workload:<12}{metric:<24}{value:>12.4g} {unit}",
            flush=True,
        )
        figure = {"workload": workload, "metric": metric, "value": round(value, 5), "unit": unit}
        results.record({**self._common, **figure, **more})


def measure_rows(
    engine: BenchmarkEngine,
    report: Report,
    kinds: dict[str, Workload],
    arguments: argparse.Namespace,
) -> None:
    """Rates and ratios of batches of one size, and the GPU's idle share in them."""
    rates = compare(engine, kinds, arguments.rounds)
    for kind, asked in kinds.items():
        each = [round(rate, 1) for rate in rates[kind]]
        middle = statistics.median(each)
        report.add(asked.name, "output_tokens", middle, "tokens/s", each=each)
        if kind != "free":
            ratios = [a / b for a, b in zip(rates[kind], rates["free"], strict=True)]
            each = [round(ratio, 4) for ratio in ratios]
            report.add(asked.name, "of_free", statistics.median(ratios), "1", each=each)
    if not torch.cuda.is_available():
        return
    steps = arguments.profiled
    for asked in kinds.values():
        phases = Phases()
        in_window(engine, asked, 16, partial(run_steps, engine, phases, steps))
        for phase, seconds in phases.seconds.items():
            report.add(asked.name, f"cpu_{phase}", sum(seconds) / steps * 1e3, "ms/step")
        with tempfile.TemporaryDirectory() as scratch:
            use = traced(engine, asked, 16, steps, Path(scratch) / "trace.json.gz")
        report.add(asked.name, "gpu_busy", use.busy_ms / steps, "ms/step")
        report.add(asked.name, "gpu_idle", (use.span_ms - use.busy_ms) / steps, "ms/step")


def measure_cold(
    engine: BenchmarkEngine, report: Report, grammars: Grammars, free: Workload, most: int
) -> None:
    """Steps of free rows, with schemas that are new to the engine and without, in turns."""
    numbers = itertools.count()
    for number in range(3):
        found = [grammars.of(cold_schema(next(numbers))) for _ in range(most)]
        without = step_seconds(engine, free, [""] * most)
        during = step_seconds(engine, free, [grammar for grammar, _ in found])
        if not number:
            continue  # warm now
        compile_ms = statistics.median(seconds for _, seconds in found) * 1e3
        report.add(free.name, "cold_compile", compile_ms, "ms", schemas=most)
        for share in (0.5, 0.99, 1.0):
            quiet, loaded = quantile(without, share), quantile(during, share)
            name = f"step_p{share * 100:g}"
            report.add(free.name, name, quiet, "ms", cold=False)
            report.add(free.name, name, loaded, "ms", cold=True)
            report.add(free.name, f"{name}_ratio", loaded / quiet, "1", cold=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profiled", type=int, default=48, help="steps under the profiler")
    parser.add_argument("--cold", type=int, default=4, help="schemas that come new; 0: none")
    parser.add_argument("--grammar-threads", type=int, help="default: one a core, 8 at most")
    add_engine_options(parser)
    arguments = parser.parse_args(argv)
    for name in arguments.model:
        model, found = find_model(name)
        with with_tokenizer(found) as model_dir:
            grammars = Grammars(model_dir)
            grammar, seconds = grammars.of(object_of_strings())
            print(f"{model}: {grammars.tokenizer.vocab_size} tokens, compiled in {seconds:.3f} s")
            changes = {"grammar_threads": arguments.grammar_threads}
            engine = BenchmarkEngine(make_settings(arguments).model_copy(update=changes), model_dir)
            try:
                check(engine, grammars, workload("one", min(8, *arguments.rows), 64, grammar))
                report = Report(engine, model)
                for rows in arguments.rows:
                    kinds = {k: workload(k, rows, arguments.tokens, grammar) for k in KINDS}
                    measure_rows(engine, report, kinds, arguments)
                if arguments.cold:
                    free = workload("free", arguments.rows[0], arguments.tokens, grammar)
                    measure_cold(engine, report, grammars, free, arguments.cold)
            finally:
                engine.close()
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
