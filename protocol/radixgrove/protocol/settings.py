"""Every setting of worker and router: one definition for YAML file, flag and environment.

The command line builds its flags from these models (`--max-running`), the environment its names
(`RADIXGROVE_MAX_RUNNING`), a YAML file its keys (`max_running`), the operator its validation of a
resource's `engine` block. Fields marked `everyday` appear in `--help`, the rest in `--help-all`.
Secrets are `SecretStr`: they print as stars and are given by environment or file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Device(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class DType(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class KVDType(StrEnum):
    AUTO = "auto"
    FP8_E4M3 = "fp8_e4m3"


class Quantize(StrEnum):
    NONE = "none"
    FP8 = "fp8"


class LoadFormat(StrEnum):
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class SamplingSource(StrEnum):
    MODEL = "model"
    OPENAI = "openai"


class AttentionChoice(StrEnum):
    AUTO = "auto"
    FLASHINFER = "flashinfer"
    TRITON = "triton"
    TORCH = "torch"


_CUDA_ATTENTION = {AttentionChoice.FLASHINFER, AttentionChoice.TRITON}


class Transport(StrEnum):
    """How activations go from stage to stage between GPUs."""

    AUTO = "auto"
    NCCL = "nccl"
    GLOO = "gloo"


class SchedulePolicy(StrEnum):
    FCFS = "fcfs"
    LPM = "lpm"
    DFS_WEIGHT = "dfs-weight"
    LONGEST_OUTPUT = "longest-output"  # for batch jobs
    PRIORITY = "priority"


class EvictionPolicy(StrEnum):
    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    PRIORITY = "priority"


class HostWritePolicy(StrEnum):
    """When a cached page is copied to the host."""

    WRITE_THROUGH = "write-through"  # as soon as it is cached
    WRITE_THROUGH_SELECTIVE = "write-through-selective"  # once it was used again
    WRITE_BACK = "write-back"  # when it leaves the device


class Sharing(StrEnum):
    PRIVATE = "private"  # a principal's cache serves only that principal
    SHARED = "shared"  # one cache for all


class RoutingPolicy(StrEnum):
    PREFIX = "prefix"
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _field(default: Any, description: str, *, everyday: bool = False, **bounds: Any) -> Any:
    return Field(
        default=default, description=description, json_schema_extra={"everyday": everyday}, **bounds
    )


def reveal(secret: SecretStr | None) -> str | None:
    """The secret in the clear; None where none is set."""
    return None if secret is None else secret.get_secret_value()


Port = Annotated[int, Field(ge=0, le=65535)]  # 0: any free port
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,?#*]+)$"
_PREFIX = r"^[A-Za-z0-9_.-]{1,64}$"
_SERVICE = r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$"
# For people: what a value must be that has one of these patterns.
FORMS = {
    _ORIGIN: "must be `*`, or like https://host[:port], without a path",
    _PREFIX: "must be 1 to 64 letters, digits, `_`, `.` or `-`",
    _SERVICE: "must be 1 to 63 of a-z, 0-9, `-` and `.`, and begin and end with a letter or digit",
}
CorsOrigin = Annotated[str, Field(pattern=_ORIGIN)]


def overlap(host: str, other: str) -> bool:
    """Whether one port cannot be bound at both addresses: they are equal, or one stands for all."""
    every, every_ipv4 = "::", ("0.0.0.0", "")
    host, other = ("127.0.0.1" if name == "localhost" else name for name in (host, other))
    return (
        host == other
        or every in (host, other)
        or (host in every_ipv4 and ":" not in other)
        or (other in every_ipv4 and ":" not in host)
    )


class StepLimits(NamedTuple):
    """What one step may hold at most."""

    max_running: int
    max_step_tokens: int


ON_CUDA = StepLimits(max_running=256, max_step_tokens=8192)
ON_CPU = StepLimits(max_running=32, max_step_tokens=512)
# Of a stage's step.
_LEAST_ON_CUDA, _LEAST_ON_CPU = 512, 64
# On a CPU, which others may use too, a step may be this many times slower than warm-up measured.
CPU_STEP_SLACK = 12.0


class Settings(BaseModel):
    """What worker and router have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    host: str = _field("127.0.0.1", "Address to listen on.", everyday=True)
    management_host: str = _field("127.0.0.1", "Address of the management port.")
    management_key: SecretStr | None = _field(
        None, "Bearer key of the management port; without one it listens on loopback only."
    )
    api_keys_file: str | None = _field(
        None,
        "File with one `principal: key` a line. Absent: no authentication, principal `local`.",
        everyday=True,
    )
    internal_key: SecretStr | None = _field(
        None, "Key with which routers prove themselves to workers."
    )
    cluster_secret: SecretStr | None = _field(
        None, "Secret that keys block hashes; the same on every worker and router of a cluster."
    )
    redis_url: str | None = _field(
        None, "redis://[:password@]host:port/db shared by routers and workers.", everyday=True
    )
    redis_prefix: str = _field("radixgrove", "Prefix of every Redis key.", pattern=_PREFIX)
    max_body_bytes: int = _field(8 << 20, "Largest request body, in bytes.", ge=1024, le=1 << 30)
    max_bodies_bytes: int = _field(
        256 << 20,
        "Bytes of request bodies that one process holds at once, before 429.",
        ge=1024,
    )
    prompt_cache_bytes: int = _field(
        256 << 20,
        "Bytes of prompts that one process keeps encoded, those of all its models together.",
        ge=0,
    )
    request_timeout: float = _field(
        60.0, "Seconds in which a request must arrive whole.", gt=0, le=86400
    )
    cors_origins: list[CorsOrigin] = _field(
        [],
        "Origins of web pages that may use the API in a browser, `https://host[:port]`; `*`: all.",
    )
    drain_timeout: float = _field(
        30.0, "Seconds that running requests get on SIGTERM.", gt=0, le=86400
    )
    log_level: LogLevel = _field(LogLevel.INFO, "Least severe message to log.", everyday=True)
    log_json: bool = _field(False, "Log JSON lines.")

    @field_validator(
        "internal_key", "management_key", "previous_internal_key", "metrics_key",
        mode="before", check_fields=False,
    )  # fmt: skip
    @classmethod
    def _fits_a_header(cls, key: object) -> object:
        """The end of line that a file or a Secret often has behind a key is no part of it. A key of
        blanks is a mistake, not none: without a key, ports are open."""
        if not isinstance(key, str):
            return key
        if not key.strip():
            raise ValueError("it is empty: give a key, or leave it out")
        return key.strip()

    @field_validator("management_port", check_fields=False)
    @classmethod
    def _is_a_port_of_its_own(cls, port: int, info: ValidationInfo) -> int:
        hosts = [info.data.get(name, "") for name in ("host", "management_host")]
        if port and port == info.data.get("port") and overlap(*hosts):
            raise PydanticCustomError(
                "same_port",
                "{port} is the port of the API too: choose another with --port or "
                "--management-port",
                {"port": port},
            )
        return port

    def in_clear(self) -> dict[str, Any]:
        """All fields as plain JSON values, secrets in clear: for files of mode 0600 only."""
        plain = self.model_dump(mode="json")
        for name in plain:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                plain[name] = reveal(value)
        return plain


class WorkerSettings(Settings):
    """One worker: an engine and its HTTP frontends."""

    model: str = _field(
        "demo", "Hugging Face directory, or `demo` for SmolLM2-135M-Instruct.", everyday=True
    )
    served_model_name: list[str] = _field(
        [], "Names under which the model is served; the first is its id.", everyday=True
    )
    port: Port = _field(8100, "Port of the OpenAI-compatible API.", everyday=True)
    management_port: Port = _field(8101, "Port of the management API.")
    frontends: int = _field(1, "HTTP processes.", ge=1, le=64)
    service: str = _field(
        "default",
        "Name of the service: its replicas share an index, and serve one model.",
        pattern=_SERVICE,
    )
    replica_id: str | None = _field(
        None, "Stable name of this replica; host:port when absent.", max_length=128
    )
    advertise_url: str | None = _field(None, "URL at which routers reach this worker.")

    device: Device = _field(Device.AUTO, "Where to run.", everyday=True)
    dtype: DType = _field(
        DType.AUTO, "Weights; auto: the model's own, float32 on CPU.", everyday=True
    )
    quantize: Quantize = _field(
        Quantize.NONE,
        "fp8: an unquantized checkpoint becomes one byte a weight while it is read.",
        everyday=True,
    )
    kv_dtype: KVDType = _field(
        KVDType.AUTO, "KV; auto: the weights' dtype; fp8_e4m3: one byte a value.", everyday=True
    )
    load_format: LoadFormat = _field(
        LoadFormat.SAFETENSORS, "`dummy`: random weights, for benchmarks."
    )
    weight_version: str = _field(
        "0",
        "Names the weights in cache keys. Of another version, as in a rollout, a replica may have "
        "another name, tokenizer or index block than the others of its service.",
        max_length=128,
    )
    tp: int = _field(1, "Tensor-parallel ranks, always of one machine.", ge=1, le=64, everyday=True)
    pp: int = _field(1, "Pipeline stages.", ge=1, le=64, everyday=True)
    dp: int = _field(
        1, "Data-parallel members of the group, each with a cache of its own.", ge=1, le=64
    )
    ep: int = _field(
        1,
        "Of a model with experts: groups of the `tp` ranks, each with experts of its own, whole.",
        ge=1,
        le=64,
        everyday=True,
    )
    pp_layers: list[Annotated[int, Field(ge=1, le=4096)]] = _field(
        [], "Layers of each stage; by default stages are level in what they compute."
    )
    transport: Transport = _field(
        Transport.AUTO,
        "How stages on GPUs pass activations on; auto: nccl. gloo: through host memory, which lets "
        "ranks share a GPU.",
    )
    nodes: int = _field(1, "Machines of the group; also `NNODES`.", ge=1, le=4096)
    node_rank: int = _field(
        0, "Which of them this one is, from 0; also `NODE_RANK`.", ge=0, le=4095
    )
    master: str | None = _field(
        None,
        "host:port at which machine 0 is met by the others; also `MASTER_ADDR` and `MASTER_PORT`.",
        max_length=512,
    )
    attention_backend: AttentionChoice = _field(
        AttentionChoice.AUTO, "Attention kernels; auto: what is fastest where it runs."
    )
    cuda_graphs: bool = _field(
        True, "Capture decode steps, and small ones that prefill, as CUDA graphs."
    )
    overlap: bool = _field(True, "Prepare the next step while the GPU runs this one.")
    cpu_threads: int | None = _field(
        None,
        "Threads of a CPU engine; by default one for each core that its CPU quota allows.",
        ge=1,
    )
    step_timeout: float = _field(
        10.0, "Seconds after which a step means a stuck rank; scaled up on a CPU.", gt=0
    )

    compare_ranks: bool = _field(
        False,
        "For debugging: ranks compare digests of each step's plan and samples; the first step that "
        "differs is named, and ends the group.",
    )

    max_model_len: int | None = _field(
        None,
        "Longest prompt + output, in tokens; default: the model's, if the KV pool holds it.",
        ge=16,
        le=1 << 24,
        everyday=True,
    )
    max_running: int | None = _field(
        None,
        f"Requests in a batch ({ON_CUDA.max_running} on CUDA, {ON_CPU.max_running} on CPU).",
        ge=1,
        le=4096,
        everyday=True,
    )
    max_step_tokens: int | None = _field(
        None,
        f"Tokens of one step, prefill chunks included ({ON_CUDA.max_step_tokens} on CUDA, "
        f"{ON_CPU.max_step_tokens} on CPU, a part of that with stages).",
        ge=1,
        le=1 << 20,
    )
    max_step_ms: float | None = _field(
        None,
        "Milliseconds that a step aims to take while rows decode: prompts are computed in smaller "
        "parts then, and tokens come more evenly. Off by default, and with `longest-output`.",
        gt=0,
        le=60_000,
    )
    page_size: int = _field(16, "Tokens of a KV page.", ge=1, le=1024)
    kv_tokens: int | None = _field(
        None,
        "Size of the KV pool in tokens; default: what memory allows.",
        ge=16,
        le=1 << 34,
        everyday=True,
    )
    memory_fraction: float = _field(
        0.9, "Share of the device's memory for weights and KV.", gt=0, le=1, everyday=True
    )
    watermark: float = _field(
        0.02, "Share of pages kept free when admitting, for requests that grow.", ge=0, lt=1
    )
    schedule_policy: SchedulePolicy = _field(
        SchedulePolicy.FCFS,
        "Order of the waiting queue; fcfs: of arrival; lpm: longest cached prefix first; "
        "dfs-weight: prefix by prefix, the one that most wait for first (both of at most 128 "
        "requests, and what has waited for 10 s goes before); longest-output: for batches that "
        "wait as a whole; priority: by the requests' `priority`, a level of which is worth 10 s of "
        "waiting.",
    )
    eviction_policy: EvictionPolicy = _field(
        EvictionPolicy.LRU,
        "Which cached page goes first; lru: used longest ago; lfu: used least often; fifo: cached "
        "longest ago; priority: of requests of the least `priority`.",
    )
    sharing: Sharing = _field(
        Sharing.PRIVATE,
        "Which principals share cached prefixes; private: none, each has its own; shared: all.",
    )
    prefix_cache: bool = _field(True, "Keep finished pages for later requests.")
    host_cache_gib: float = _field(
        0.0,
        "GiB of host memory, over all ranks, for cached pages that leave the device; 0: none.",
        ge=0,
        le=1 << 16,
        everyday=True,
    )
    host_write_policy: HostWritePolicy = _field(
        HostWritePolicy.WRITE_THROUGH, "When cached pages are copied to the host."
    )
    index_block: int | None = _field(
        None, "Tokens of a block of the routers' index; a multiple of the page.", ge=1, le=4096
    )
    max_queued: int = _field(1024, "Waiting requests before 429.", ge=0, le=1 << 20)
    max_queued_tokens: int = _field(4 << 20, "Prompt tokens of waiting requests before 429.", ge=0)
    queue_timeout: float = _field(120.0, "Seconds a request may wait.", gt=0, le=86400)
    json_whitespace: int = _field(
        8,
        "Most characters of white space between two tokens of JSON that a schema asks for.",
        ge=0,
        le=1024,
    )
    grammar_timeout: float = _field(
        2.0, "Seconds to compile what an answer must be, before 400.", gt=0, le=600
    )
    grammar_jump: int = _field(
        0,
        "Text of so many tokens or more that a grammar leaves no choice about comes at once, "
        "computed as a prompt is; 0: token by token.",
        ge=0,
        le=1024,
    )
    grammar_threads: int | None = _field(
        None,
        "Threads of the engine that compute which tokens may come next; by default one for each "
        "core, 8 at most.",
        ge=1,
        le=256,
    )
    chat_template: str | None = _field(
        None, "A file with a chat template in place of the model's.", max_length=4096
    )
    sampling_defaults: SamplingSource = _field(
        SamplingSource.MODEL,
        "Temperature, top_p, top_k, min_p and repetition_penalty of requests that leave them out; "
        "model: as its `generation_config.json` recommends; openai: 1, 1, off, off, 1.",
    )
    tools_strict: bool = _field(
        True, "Hold arguments of calls to their schemas also where a tool is not `strict`."
    )
    output_format: str = _field(
        "auto",
        "How the model writes reasoning and tool calls; auto: as its chat template says; none: "
        "calls are not understood.",
        max_length=64,
    )
    log_prompts: bool = _field(False, "Log prompts and answers. Off: they never reach a log.")

    @field_validator("served_model_name")
    @classmethod
    def _can_be_asked_for(cls, names: list[str]) -> list[str]:
        if not all(name.strip() for name in names):
            raise PydanticCustomError("empty_name", "has an empty name, which no request can give")
        return names

    @field_validator("host_cache_gib")
    @classmethod
    def _needs_prefix_cache(cls, size: float, info: ValidationInfo) -> float:
        if size > 0 and not info.data.get("prefix_cache", True):
            raise PydanticCustomError(
                "no_prefix_cache", "needs prefix_cache: with it off there is nothing to keep"
            )
        return size

    @field_validator("index_block")
    @classmethod
    def _holds_whole_pages(cls, size: int | None, info: ValidationInfo) -> int | None:
        page = info.data.get("page_size", 1)
        if size is not None and size % page:
            raise PydanticCustomError(
                "no_multiple", "must be a multiple of page_size {page}", {"page": page}
            )
        return size

    @field_validator("kv_tokens")
    @classmethod
    def _holds_the_longest_request(cls, size: int | None, info: ValidationInfo) -> int | None:
        longest, page = info.data.get("max_model_len"), info.data.get("page_size", 1)
        if size is None:
            return size
        if size < page:
            raise PydanticCustomError(
                "no_page", "is less than one page of page_size {page}", {"page": page}
            )
        if longest is not None and longest > size // page * page:
            raise PydanticCustomError(
                "too_small",
                "is less than max_model_len {longest} in whole pages: no request of that length "
                "would fit",
                {"longest": longest},
            )
        return size

    @field_validator("attention_backend")
    @classmethod
    def _runs_there(cls, backend: AttentionChoice, info: ValidationInfo) -> AttentionChoice:
        if backend in _CUDA_ATTENTION and info.data.get("device") is Device.CPU:
            raise PydanticCustomError("needs_cuda", "needs CUDA, and device is cpu")
        if backend is AttentionChoice.FLASHINFER and info.data.get("kv_dtype") is KVDType.FP8_E4M3:
            raise PydanticCustomError(
                "no_kernels", "has no kernels for kv_dtype fp8_e4m3: use triton or torch"
            )
        return backend

    def step_limits(self, *, on_cpu: bool) -> StepLimits:
        """As set, else the device's defaults."""
        running, tokens = ON_CPU if on_cpu else ON_CUDA
        if self.pp > 1:
            # So that chunks of a long prompt are in all stages at once, and none waits for long
            # while another computes one.
            tokens = max(_LEAST_ON_CPU if on_cpu else _LEAST_ON_CUDA, tokens // (2 * self.pp))
        return StepLimits(self.max_running or running, self.max_step_tokens or tokens)


class RouterSettings(Settings):
    """The router: one OpenAI-compatible endpoint before all replicas."""

    port: Port = _field(8000, "Port of the OpenAI-compatible API.", everyday=True)
    management_port: Port = _field(8001, "Port of the management API.")
    processes: int = _field(1, "Router processes that share the port.", ge=1, le=64)
    router_id: str | None = _field(None, "Stable name; host:port when absent.", max_length=128)
    replicas: list[str] = _field(
        [],
        "Static replicas, `URL` or `model=URL`, beside those registered in Redis.",
        everyday=True,
    )
    model_table: str | None = _field(
        None,
        "Name of the operator's model table in Redis; only replicas it lists are served then.",
        pattern=_SERVICE,
    )
    metrics_key: SecretStr | None = _field(
        None, "Bearer key that opens `/metrics` of the API port, and nothing else."
    )
    root_key: SecretStr | None = _field(
        None, "Key from which those of each namespace in the model table are derived."
    )
    previous_internal_key: SecretStr | None = _field(
        None, "`internal_key` of replicas that still have `previous_cluster_secret`."
    )
    previous_cluster_secret: SecretStr | None = _field(
        None, "Another secret that replicas may have, while they are changed over to a new one."
    )
    policy: RoutingPolicy = _field(RoutingPolicy.PREFIX, "Placement policy.", everyday=True)
    redis_timeout: float = _field(
        0.05,
        "Seconds a request waits at most for a placement by Redis; then the router places it "
        "by its own view.",
        gt=0,
        le=10,
    )
    connect_timeout: float = _field(2.0, "Seconds to connect to a replica.", gt=0, le=600)
    first_byte_timeout: float = _field(
        600.0,
        "Seconds from a request to the first byte of its answer (a non-streaming answer whole), "
        "however many replicas it goes to.",
        gt=0,
        le=86400,
    )
    idle_timeout: float = _field(
        120.0,
        "Seconds between two bytes of a stream, or of an answer that its client reads.",
        gt=0,
        le=86400,
    )
    retries: int = _field(
        2,
        "How often a request that failed at a replica goes to another before the first byte; "
        "without limit where it never got there.",
        ge=0,
        le=16,
    )
    max_queued: int = _field(
        4096, "Requests in flight through one router process before 429.", ge=1, le=1 << 20
    )
    queue_timeout: float = _field(
        30.0, "Seconds that a request may be without a replica that takes it.", ge=0, le=3600
    )
    breaker_failures: int = _field(5, "Failures in a row that open a replica's breaker.", ge=1)
    breaker_seconds: float = _field(
        10.0,
        "Seconds a breaker stays open; less where the replica was only out of reach, and answers.",
        gt=0,
        le=3600,
    )
    reveal_replica: bool = _field(
        False, "Send `x-radixgrove-replica` and matched tokens to clients that ask."
    )
