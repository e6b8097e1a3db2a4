"""The agent's promises: one worker lives, drains and dies whole, and says why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from safetensors.torch import save_file

from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.registry import Lease, LeaseState, Registration
from radixgrove.protocol.words import counted
from radixgrove.service import exit_codes
from radixgrove.service.directories import remove_abandoned
from tests.conftest import RedisServer, find_free_port, wait_until
from tests.worker.agent.conftest import RefusedAgent, StartAgent, write_index


def test_starts_says_what_fits_and_drains_on_sigterm(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    assert "start: loading 50%: reading weights" in agent.output
    assert "KV cache 1 MiB: 64 pages of 16 tokens = 1024 tokens, 1 KiB a token " in agent.output
    assert "a token (fp8_e4m3)" in agent.output
    assert "host tier 10 MiB: 640 pages = 10240 tokens, brought back at 5000 " in agent.output
    assert "room for 2 requests of 512 tokens at once" in agent.output
    (agent.notes / "busy").touch()

    agent.process.send_signal(signal.SIGTERM)
    wait_until((agent.notes / "draining").exists, what="the frontend's drain")
    assert agent.child("fake_engine").is_running(), "the engine outlives the frontends' drain"
    (agent.notes / "busy").unlink()

    assert agent.end() == 0
    assert (agent.notes / "drained").exists()
    assert not list(agent.notes.glob("radixgrove-worker-*")), "the runtime directory is removed"


def test_an_engine_that_fails_as_its_last_request_ends_is_named(start_agent: StartAgent) -> None:
    """The error is the last answer, so that draining may be over before the death is seen."""
    agent = start_agent("fail-at-end")
    agent.wait_ready()
    engine = agent.child("fake_engine")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == 1
    said = rf"engine rank 0 \(process {engine.pid}\) .*another rank is silent, while draining"
    assert re.search(said, agent.lines[-1]), agent.output


def test_second_signal_ends_without_draining(start_agent: StartAgent) -> None:
    agent = start_agent(drain_timeout=600)
    agent.wait_ready()
    (agent.notes / "busy").touch()
    agent.process.send_signal(signal.SIGINT)
    wait_until((agent.notes / "draining").exists, what="the frontend's drain")

    agent.process.send_signal(signal.SIGINT)
    agent.end()
    assert not (agent.notes / "drained").exists()


def test_dead_engine_takes_the_worker_down_and_is_named(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    engine = agent.child("fake_engine")
    engine.kill()
    assert agent.end() == 1
    assert f"engine rank 0 (process {engine.pid}) was killed by SIGKILL" in agent.output


def test_status_names_the_lost_rank_while_the_worker_ends(start_agent: StartAgent) -> None:
    agent = start_agent(tp=2)
    agent.wait_ready()
    (agent.notes / "busy").touch()  # the frontend still has requests, which are to hear of it
    rank = agent.rank(1)
    rank.kill()
    wait_until((agent.notes / "draining").exists, what="the frontend's end")
    status = agent.manage("GET", "/status")[1]
    assert status["state"] == "failed"
    assert f"engine rank 1 (process {rank.pid}) was killed" in status["failure"]
    assert agent.end() == 1


def test_dead_second_rank_is_named(start_agent: StartAgent) -> None:
    agent = start_agent(tp=2)
    agent.wait_ready()
    rank = agent.rank(1)
    rank.kill()
    assert agent.end() == 1
    assert f"engine rank 1 (process {rank.pid}) was killed" in agent.output


def test_members_are_one_group_that_shows_each_of_them(
    start_agent: StartAgent, redis_server: RedisServer
) -> None:
    agent = start_agent(dp=2, redis_url=redis_server.url, replica_id="g")
    agent.wait_ready()
    status = agent.manage("GET", "/status")[1]
    assert [m["replica_id"] for m in status["members"]] == ["g/0", "g/1"]
    assert all(m["ready"] and m["publisher"]["registered"] for m in status["members"])
    assert [m["stats"]["pages_total"] for m in status["members"]] == [64, 64]
    assert status["stats"]["pages_total"] == 128
    keys = ServiceKeys("radixgrove", "default")
    found = redis_server.client.hgetall(keys.replicas)
    members = [Registration.decode(data) for _, data in sorted(found.items())]
    assert [(m.group, m.dp_rank, m.dp) for m in members] == [("g", 0, 2), ("g", 1, 2)]
    assert len({m.url for m in members}) == 1
    assert agent.manage("POST", "/flush-cache")[0] == 202
    wait_until(lambda: agent.heard().count("FlushCache") == 2, what="both flushes")

    assert agent.manage("POST", "/drain")[0] == 200
    leases = [Lease.unpack(data) for data in redis_server.client.hvals(keys.leases)]
    assert [lease.state for lease in leases] == [LeaseState.DRAINING] * 2
    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == 0
    assert not redis_server.client.hgetall(keys.replicas), "both have left"


def test_a_stopped_rank_of_the_second_member_ends_the_group_and_is_named(
    start_agent: StartAgent,
) -> None:
    agent = start_agent(dp=2)
    agent.wait_ready()
    rank = agent.rank(1)
    rank.send_signal(signal.SIGSTOP)
    assert agent.end() == 4
    assert f"engine rank 1 (process {rank.pid}) is stuck" in agent.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_it_loads_is_named(rank: int, start_agent: StartAgent) -> None:
    agent = start_agent("load-forever", tp=2)
    engine = agent.rank(rank)
    engine.suspend()
    assert agent.end() == 4
    named = f"engine rank {rank} (process {engine.pid}) is stuck: it has been stopped"
    assert named in agent.output


def test_dead_frontend_takes_the_worker_down(start_agent: StartAgent) -> None:
    agent = start_agent(frontends=2)
    agent.wait_ready()
    agent.child("fake_frontend").kill()
    assert agent.end() == 1
    assert "frontend 0" in agent.output


def test_a_frontend_that_hangs_takes_the_worker_down_and_is_named(start_agent: StartAgent) -> None:
    agent = start_agent(frontends=2)
    agent.wait_ready()
    frontend = agent.child("fake_frontend")
    frontend.suspend()
    assert agent.end() == 4
    assert f"frontend 0 (process {frontend.pid}) hangs: its event loop" in agent.output


def test_failed_start_names_the_cause_last(start_agent: StartAgent) -> None:
    agent = start_agent("die-at-start")
    assert agent.end() == 1
    first, last = [line for line in agent.lines if " ERROR " in line]
    for line in (first, last):
        assert "engine rank 0" in line
        assert "exited with code 1: RuntimeError: out of imaginary memory" in line
    assert last == agent.lines[-1], "of a container's log only the end is kept"


def test_stopped_engine_is_killed_and_named(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    engine = agent.child("fake_engine")
    engine.send_signal(signal.SIGSTOP)
    # Readiness ends well before the kill.
    wait_until(lambda: agent.manage("GET", "/readyz")[0] == 503, what="not ready")
    assert agent.process.poll() is None
    assert agent.end() == 4
    assert f"engine rank 0 (process {engine.pid}) is stuck" in agent.output


def test_step_past_its_deadline_is_a_stuck_engine(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    runtime = next(agent.notes.glob("radixgrove-worker-*"))
    send_to_engine(runtime / "engine-0.sock", "long-step")
    assert agent.end() == 4
    assert "past its deadline" in agent.output


def test_an_hour_back_does_not_blind_the_watchdog(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    agent.child("fake_engine").send_signal(signal.SIGSTOP)
    agent.shift_wall_clock(-3600)
    wait_until(lambda: agent.manage("GET", "/readyz")[0] == 503, what="not ready")
    assert agent.end() == 4


def test_an_hour_forward_ends_no_step(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    runtime = next(agent.notes.glob("radixgrove-worker-*"))
    send_to_engine(runtime / "engine-0.sock", "step-of-a-minute")

    def uptime() -> float:
        seconds = agent.manage("GET", "/status")[1]["uptime_seconds"]
        assert isinstance(seconds, float)
        return seconds

    wait_until(
        lambda: agent.manage("GET", "/status")[1]["stats"]["step_remaining"], what="the long step"
    )
    agent.shift_wall_clock(3600)
    began = uptime()
    # The agent looks after its engine twice a second.
    wait_until(lambda: uptime() > began + 1.5, what="three looks of the agent")
    assert agent.manage("GET", "/readyz")[0] == 200


def test_kill_of_the_agent_leaves_no_process_behind(start_agent: StartAgent) -> None:
    agent = start_agent(frontends=2, tp=2)
    agent.wait_ready()
    assert len(agent.children) == 4
    agent.process.kill()
    agent.end()


def test_remains_of_a_killed_agent_are_removed_by_the_next(start_agent: StartAgent) -> None:
    first = start_agent()
    first.wait_ready()
    first.process.kill()
    first.end()
    (left,) = first.notes.glob("radixgrove-worker-*")
    second = start_agent()
    second.wait_ready()
    (mine,) = second.notes.glob("radixgrove-worker-*")
    assert left.exists(), "another TMPDIR is not touched"
    assert mine.exists(), "a living agent keeps its directory"
    remove_abandoned(first.notes, "radixgrove-worker-")
    remove_abandoned(second.notes, "radixgrove-worker-")
    assert not left.exists()
    assert mine.exists()


def test_a_taken_port_is_refused_even_when_shared(refused_agent: RefusedAgent) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, output = refused_agent(port=port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in output
    assert "--port" in output


def test_a_model_that_is_none_is_refused(refused_agent: RefusedAgent) -> None:
    code, output = refused_agent(model="/nonexistent/model")
    assert code == exit_codes.MODEL
    assert "pass a local Hugging Face directory, or `demo`" in output


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 16), (1, 8)])
def test_ranks_that_would_stay_idle_are_refused(
    refused_agent: RefusedAgent, nodes: int, ranks: int
) -> None:
    """As the operator says it."""
    code, output = refused_agent(
        {
            "GROUP_MARKER": "/run/radixgrove/joined",
            "NNODES": str(nodes),
            "WORLD_SIZE": str(ranks),
        }
    )
    assert code == exit_codes.USAGE
    assert f"the group has {ranks} ranks on {counted(nodes, 'node')}" in output
    assert "tp 1 * pp 1 * dp 1 is 1" in output


def test_a_group_of_this_workers_own_ranks_is_served(
    start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_MARKER", "/run/radixgrove/joined")
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    start_agent().wait_ready()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"architectures": ['),
        ("tokenizer.json", b'{"version": "1.0", "trunc'),
        ("tokenizer_config.json", b"[]"),
        ("model.safetensors", b"no safetensors"),
        (
            "model-00002.safetensors",
            (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9]',
        ),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_a_damaged_file_is_named_before_anything_starts(
    refused_agent: RefusedAgent, model_dir: Path, name: str, content: bytes
) -> None:
    if name.startswith("model") and name != "model.safetensors":
        write_index(model_dir, "model-00002.safetensors")
    (model_dir / name).write_bytes(content)
    code, output = refused_agent()
    assert code == exit_codes.MODEL
    assert "Traceback" not in output
    (line,) = output.splitlines()
    assert "ERROR" in line
    assert name in line
    assert str(model_dir) in line
    assert "download or copy the model again" in line


def test_a_given_chat_template_that_is_none_is_named_and_not_the_model(
    refused_agent: RefusedAgent, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    code, output = refused_agent(chat_template=str(template))
    assert code == exit_codes.MODEL
    (line,) = output.splitlines()
    assert f"chat_template '{template}': the chat template is not valid Jinja: " in line
    assert "(line 2)" in line
    assert "model directory" not in line


@pytest.mark.parametrize(
    ("name", "reason"), [("no.jinja", "No such file or directory"), (".", "Is a directory")]
)
def test_a_given_chat_template_that_is_not_there_is_named_and_not_the_model(
    refused_agent: RefusedAgent, tmp_path: Path, name: str, reason: str
) -> None:
    code, output = refused_agent(chat_template=str(tmp_path / name))
    assert code == exit_codes.MODEL
    (line,) = output.splitlines()
    assert f"chat_template '{tmp_path / name}': {reason}" in line
    assert "model directory" not in line


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tp": 9}, "tp 9 does not divide the model's"),
        ({"pp": 2, "pp_layers": [9, 9]}, "pp_layers [9, 9] are not the model's"),
        ({"max_model_len": 100_000}, "max_model_len 100000 exceeds the model's"),
    ],
    ids=str,
)
def test_what_the_model_cannot_be_is_refused_before_anything_starts(
    refused_agent: RefusedAgent, settings: dict[str, Any], reason: str
) -> None:
    code, output = refused_agent(**settings)
    assert code == exit_codes.USAGE
    (line,) = output.splitlines()
    assert reason in line
    assert "model directory" not in line


def test_damaged_files_that_nothing_reads_do_not_matter(
    start_agent: StartAgent, model_dir: Path
) -> None:
    write_index(model_dir, "model-00001.safetensors")
    save_file({"model.norm.weight": torch.ones(16)}, model_dir / "model-00001.safetensors")
    for name in ("model-00002.safetensors", "consolidated.safetensors", "processor_config.json"):
        (model_dir / name).write_bytes(b"no safetensors")
    start_agent().wait_ready()


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(
    refused_agent: RefusedAgent, model_dir: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_bytes()) | {"embedding_multiplier": 12.0}
    (model_dir / "config.json").write_text(json.dumps(config))
    code, output = refused_agent()
    assert code == exit_codes.MODEL
    (line,) = output.splitlines()
    assert "embedding_multiplier 12.0 is not supported" in line
    assert "download" not in line


def test_a_tokenizer_that_knows_more_than_the_model_is_warned_of(
    start_agent: StartAgent, model_dir: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_bytes())
    (model_dir / "config.json").write_text(json.dumps(config | {"vocab_size": 1}))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    agent = start_agent()
    agent.wait_ready()
    assert "the tokenizer has 2 token ids and the model rows for 1" in agent.output


def test_management_needs_its_key(start_agent: StartAgent) -> None:
    agent = start_agent(management_key="open sesame")
    agent.wait_ready()
    assert agent.manage("GET", "/livez")[0] == 200
    assert agent.manage("GET", "/readyz") == (200, {"status": "ok"})
    for method, path in [("GET", "/status"), ("POST", "/drain"), ("GET", "/unknown")]:
        assert agent.manage(method, path)[0] == 401
        assert agent.manage(method, path, key="open sesam")[0] == 401
    status, answer = agent.manage("GET", "/status", key="open sesame")
    assert status == 200
    assert answer["state"] == "ready"
    assert answer["models"] == ["tiny-model"]
    assert answer["stats"]["pages_total"] == 64
    assert answer["stats"]["host_pages_total"] == 640
    assert answer["engine"]["max_model_len"] == 512


def test_management_on_all_addresses_answers_in_both_families(start_agent: StartAgent) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    agent = start_agent(management_host="::", management_key="open sesame")
    agent.wait_ready()
    found = re.search(r"management port: \S*:(\d+)", agent.output)
    assert found, agent.output
    for host in ("127.0.0.1", "[::1]"):
        with urllib.request.urlopen(f"http://{host}:{found[1]}/livez", timeout=10) as answer:
            assert answer.status == 200


def test_management_without_key_stays_on_loopback(refused_agent: RefusedAgent) -> None:
    code, output = refused_agent(management_host="0.0.0.0")
    assert code == exit_codes.USAGE
    assert "set management_key" in output


def test_management_flushes_drains_and_changes_the_log_level(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.wait_ready()
    assert agent.manage("POST", "/flush-cache")[0] == 202
    wait_until(lambda: "FlushCache" in agent.heard(), what="the flush")

    assert agent.manage("POST", "/log-level", {"level": "loud"})[0] == 400
    assert agent.manage("POST", "/log-level", {"level": "error"})[0] == 200
    (runtime,) = agent.notes.glob("radixgrove-worker-*")
    assert (runtime / "log-level").read_text() == "error"

    assert agent.manage("GET", "/flush-cache")[0] == 405
    status, answer = agent.manage("POST", "/drain")
    assert (status, answer["state"]) == (200, "draining")
    assert agent.manage("GET", "/readyz")[0] == 503
    assert agent.process.poll() is None, "a drained worker stays up until SIGTERM"
    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == 0


def test_routers_learn_how_fast_the_engine_computes_and_loads(
    start_agent: StartAgent, redis_server: RedisServer
) -> None:
    agent = start_agent(redis_url=redis_server.url, replica_id="r0")
    agent.wait_ready()
    keys = ServiceKeys("radixgrove", "default")
    (record,) = redis.Redis.from_url(redis_server.url).hvals(keys.replicas)
    engine = Registration.decode(record).engine
    assert engine.prefill_tokens_per_second == 100.0
    assert engine.host_tokens_per_second == 5000.0


def test_a_worker_of_which_no_router_would_hear_ends(
    start_agent: StartAgent, redis_server: RedisServer
) -> None:
    agent = start_agent("redis-link-fails", redis_url=redis_server.url)
    assert agent.end() == 1
    assert "ValueError: unforeseen" in agent.output
    assert "the worker ends because its readiness task did" in agent.output


def test_a_worker_whose_output_is_not_read_goes_on_and_counts_what_it_drops(
    start_agent: StartAgent,
) -> None:
    port = find_free_port()
    agent = start_agent("chatty", read=False, management_port=port)

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
                return True
        except OSError:
            return False

    wait_until(ready, deadline=60, what="a ready worker")
    (runtime,) = agent.notes.glob("radixgrove-worker-*")
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(runtime / "metrics"))
    assert (registry.get_sample_value("radixgrove_log_lines_dropped_total") or 0) > 1000
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(60) == 0


def test_runtime_files_are_private(start_agent: StartAgent) -> None:
    agent = start_agent(internal_key="hush")
    agent.wait_ready()
    (runtime,) = agent.notes.glob("radixgrove-worker-*")
    assert os.stat(runtime).st_mode & 0o077 == 0
    assert os.stat(runtime / "worker.json").st_mode & 0o077 == 0
    assert "hush" in (runtime / "worker.json").read_text()
    assert "hush" not in agent.output
    for process in [psutil.Process(agent.process.pid), *agent.children]:
        assert not any("hush" in word for word in process.cmdline() if "{" not in word)
        assert "hush" not in process.environ().values()


def send_to_engine(path: object, request_id: str) -> None:
    import msgspec
    import zmq

    from radixgrove.worker.messages import Abort

    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{path}")
        push.send(msgspec.msgpack.encode(Abort(request_id)))
