"""Settings: one definition, a documented precedence, and no key that is silently ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from radixgrove.cli.configuration import (
    EMPTY_FILE,
    PARTS,
    ConfigurationError,
    flag_of,
    is_secret,
    load_environment,
    load_file,
    resolve,
    show,
)
from radixgrove.cli.options import setting_options
from radixgrove.cli.resolving import ConfigurationUsage, UpParts, resolve_part
from radixgrove.protocol.settings import FORMS, RouterSettings, WorkerSettings
from tests.checkout import ROOT
from tests.cli.test_command import radixgrove
from tools.reference import DOCS, updated


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "radixgrove.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(("part", "model"), PARTS.items())
def test_every_field_but_secrets_is_a_flag(part: str, model: type[BaseModel]) -> None:
    flags = {option for parameter in setting_options(part) for option in parameter.opts}
    for name, field in model.model_fields.items():
        assert (flag_of(name) in flags) is not is_secret(field), name


def test_flag_wins_over_variable_over_section_over_top_level(write: Any) -> None:
    file = load_file(
        write("host: a\nport: 1\nlog_level: error\nredis_prefix: p\nworker: {port: 2, host: b}\n")
    )
    environment = load_environment({"RADIXGROVE_HOST": "c", "RADIXGROVE_PORT": "3"})
    resolved = resolve("worker", {"host": "d", "port": None}, environment, file)
    settings: WorkerSettings = resolved.settings
    assert (settings.host, settings.port) == ("d", 3)
    assert (settings.log_level, settings.redis_prefix) == ("error", "p")
    assert resolved.sources["host"] == "--host"
    assert resolved.sources["port"] == "RADIXGROVE_PORT"
    assert resolved.sources["log_level"] == file.name
    assert resolved.sources["model"] == "default"
    without = resolve("worker", {}, {}, file)
    assert (without.settings.port, without.sources["port"]) == (2, f"{file.name} (worker)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_runing: 3\n", "unknown key 'max_runing'; did you mean 'max_running'?"),
        ("worker: {polcy: prefix}\n", "section 'worker': unknown key 'polcy'"),
        ("worker: {policy: prefix}\n", "section 'worker': unknown key 'policy'"),
        ("wroker: {}\n", "did you mean 'worker'?"),
        ("- a\n", "must be a mapping"),
        ("worker: 3\n", "section 'worker' must be a mapping"),
        ("a: [\n", "not valid YAML"),
        ("port: 1\nport: 2\n", "the key 'port' is given twice (line 2)"),
        ("worker:\n  tp: 1\n  tp: 2\n", "the key 'tp' is given twice (line 3)"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_file(write(text))
    assert message in str(caught.value)


def test_a_file_may_come_from_windows_and_name_no_key_twice(write: Any) -> None:
    text = "\ufeffworker: &all {tp: 2}\r\nup:\r\n  replicas: 3\r\n"
    assert load_file(write(text)).sections == {"worker": {"tp": 2}, "up": {"replicas": 3}}
    merged = "router: &ours {port: 1}\nworker:\n  <<: *ours\n  port: 2\n"
    assert load_file(write(merged)).sections["worker"] == {"port": 2}


def test_an_anchor_that_merges_another_names_no_key_twice(write: Any) -> None:
    merged = (
        "router: &ours {replicas: 1}\n"
        "worker:\n  cors_origins:\n    - &all {<<: *ours, replicas: 2}\n"
        "up: {<<: *all}\n"
    )
    assert load_file(write(merged)).sections["up"] == {"replicas": 2}
    twice = "router: {port: 1}\nworker:\n  cors_origins:\n    - {a: 1, a: 2}\n"
    with pytest.raises(ConfigurationError, match=r"'a' is given twice \(line 4\)"):
        load_file(write(twice))


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGROVE_CONFIG", "")
    assert resolve_part("worker", None, {}).sources["port"] == "default"


def test_an_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'RADIXGROVE_MAX_RUNNING'"):
        load_environment({"RADIXGROVE_MAX_RUNING": "3"})
    with pytest.raises(ConfigurationError, match=r"variable 'RADIXGROVE_FOO'$"):
        load_environment({"RADIXGROVE_FOO": "3"})


def test_variables_of_clients_are_no_settings_and_no_error() -> None:
    assert load_environment({"RADIXGROVE_URL": "http://x", "PATH": "/bin"}) == {}


def test_variables_that_kernels_read_do_not_stop_a_worker() -> None:
    sources = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "worker/radixgrove").rglob("*.py")]
    names = re.findall(
        r'environ\.get\("(RADIXGROVE_\w+)"', "".join(path.read_text() for path in sources)
    )
    assert "RADIXGROVE_CACHE_DIR" in names
    assert load_environment(dict.fromkeys(names, "0")) == {}


def test_variables_that_kubernetes_adds_for_services_are_no_settings() -> None:
    links = {
        "RADIXGROVE_SERVICE_HOST": "10.0.0.1",
        "RADIXGROVE_SERVICE_PORT_HTTP": "80",
        "RADIXGROVE_PORT": "tcp://10.0.0.1:80",
        "RADIXGROVE_PORT_80_TCP_ADDR": "10.0.0.1",
        "RADIXGROVE_ROUTER_SERVICE_HOST": "10.0.0.2",
        "RADIXGROVE_ROUTER_PORT": "tcp://10.0.0.2:80",
        "RADIXGROVE_ROUTER_PORT_80_TCP": "tcp://10.0.0.2:80",
    }
    assert load_environment(links) == {}
    mine = load_environment({"RADIXGROVE_SERVICE_HOST": "10.0.0.1", "RADIXGROVE_PORT": "9000"})
    assert mine == {"port": "9000"}
    with pytest.raises(ConfigurationError):
        load_environment({"RADIXGROVE_ROUTER_PORT": "tcp://10.0.0.2:80"})


def test_lists_and_switches_come_from_everywhere(write: Any) -> None:
    environment = load_environment(
        {"RADIXGROVE_REPLICAS": "http://a, http://b", "RADIXGROVE_LOG_JSON": "true"}
    )
    settings: RouterSettings = resolve("router", {}, environment, EMPTY_FILE).settings
    assert settings.replicas == ["http://a", "http://b"]
    assert settings.log_json is True
    file = load_file(write("router: {replicas: [http://c]}\n"))
    assert resolve("router", {}, {}, file).settings.replicas == ["http://c"]


def test_a_wrong_value_names_its_source_and_not_the_value() -> None:
    environment = load_environment({"RADIXGROVE_MAX_RUNNING": "s3cret"})
    with pytest.raises(ConfigurationError) as caught:
        resolve("worker", {}, environment, EMPTY_FILE)
    assert "max_running (from RADIXGROVE_MAX_RUNNING)" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("part", ["router", "worker"])
@pytest.mark.parametrize(
    ("host", "management_host", "refused"),
    [
        ("127.0.0.1", "localhost", True),
        ("0.0.0.0", "10.0.0.1", True),
        ("::1", "::", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("0.0.0.0", "::1", False),
    ],
)
def test_one_port_cannot_be_that_of_the_api_and_of_management(
    part: str, host: str, management_host: str, refused: bool
) -> None:
    flags = {"host": host, "management_host": management_host}
    equal = {"port": "9000", "management_port": "9000"}
    resolve(part, flags | {"port": "0", "management_port": "0"}, {}, EMPTY_FILE)
    if not refused:
        resolve(part, flags | equal, {}, EMPTY_FILE)
        return
    with pytest.raises(ConfigurationError, match=r"9000 .* --port or --management-port$"):
        resolve(part, flags | equal, {}, EMPTY_FILE)


def test_a_port_may_be_the_one_that_management_has_by_default() -> None:
    with pytest.raises(ConfigurationError, match=r"management_port \(from default\): 8001 is"):
        resolve("router", {"port": "8001"}, {}, EMPTY_FILE)
    with pytest.raises(ConfigurationUsage, match="8001 is the port of the API too"):
        UpParts(None, {"port": "8001"})


def test_a_wrong_value_of_a_flag_is_shown_with_what_would_be_right() -> None:
    for flags, said in [
        ({"max_running": "many"}, "max_running (from --max-running many): must be a whole number"),
        ({"cuda_graphs": "maybe"}, "cuda_graphs (from --cuda-graphs maybe): must be true or false"),
        (
            {"pp_layers": ["10,20"]},
            "pp_layers (from --pp-layers 10,20): must be a whole number; one value each, as in "
            "--pp-layers A --pp-layers B",
        ),
        (
            {"cors_origins": ["a.example"]},
            "cors_origins (from --cors-origins a.example): must be `*`, or like "
            "https://host[:port], without a path",
        ),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            resolve("worker", flags, {}, EMPTY_FILE)
        assert str(caught.value) == said


@pytest.mark.parametrize("part", PARTS)
def test_every_pattern_has_words_for_people(part: str) -> None:
    patterns = re.findall(r'"pattern": "(.*?)"[,}]', json.dumps(PARTS[part].model_json_schema()))
    assert {json.loads(f'"{pattern}"') for pattern in patterns} <= FORMS.keys()


def test_a_host_cache_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve("worker", {"host_cache_gib": "8", "prefix_cache": False}, {}, EMPTY_FILE)
    assert str(caught.value).startswith("host_cache_gib (from --host-cache-gib 8): needs prefix_")
    kept: WorkerSettings = resolve("worker", {"host_cache_gib": "8"}, {}, EMPTY_FILE).settings
    assert kept.host_cache_gib == 8.0
    without = resolve("worker", {"prefix_cache": False}, {}, EMPTY_FILE).settings
    assert without.host_cache_gib == 0.0


def test_up_gives_each_part_what_is_its_own(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGROVE_PAGE_SIZE", "32")
    path = write("port: 9000\nrouter: {max_queued: 7}\nworker: {max_queued: 8}\n")
    parts = UpParts(path, {"replicas": "3", "policy": "random", "host": "0.0.0.0"})
    assert parts.up.settings.replicas == 3
    router, worker = parts.router.settings, parts.worker.settings
    assert (router.port, router.policy, router.max_queued) == (9000, "random", 7)
    assert (router.host, worker.host) == ("0.0.0.0", "127.0.0.1")
    assert (worker.page_size, worker.max_queued, worker.port) == (32, 8, 8100)


def test_up_takes_the_machines_redis_where_nothing_else_names_one(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`REDIS_URL` is what other programs call it; without it a Redis is started."""
    url = "redis://machine:6379/0"
    assert UpParts(None, {}).router.settings.redis_url is None
    monkeypatch.setenv("REDIS_URL", url)
    parts = UpParts(None, {})
    assert [parts.router.settings.redis_url, parts.worker.settings.redis_url] == [url, url]
    assert parts.router.sources["redis_url"] == parts.worker.sources["redis_url"] == "REDIS_URL"
    for named in (
        UpParts(None, {"redis_url": "redis://own/1"}),
        UpParts(write("worker: {redis_url: redis://own/1}\n"), {}),
    ):
        assert named.worker.settings.redis_url == "redis://own/1"
        assert named.router.settings.redis_url in ("redis://own/1", None)
    assert resolve_part("router", None, {}).settings.redis_url is None


def test_up_refuses_what_would_mean_two_things(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationUsage, match="max_queued belongs in a section"):
        UpParts(write("max_queued: 7\n"), {})
    monkeypatch.setenv("RADIXGROVE_QUEUE_TIMEOUT", "7")
    with pytest.raises(ConfigurationUsage, match="section"):
        UpParts(None, {})


def test_config_show_prints_sources_and_hides_secrets(write: Any) -> None:
    path = write("worker: {cluster_secret: hush}\nredis_url: redis://:pssst@localhost/0\n")
    result = radixgrove(
        "config", "show", "worker", "--config", path, RADIXGROVE_INTERNAL_KEY="psst"
    )
    assert result.returncode == 0
    lines = {line.split(":")[0].strip(): line for line in result.stdout.splitlines()}
    assert "********" in lines["cluster_secret"]
    assert lines["cluster_secret"].endswith(f"# {path} (worker)")
    assert "RADIXGROVE_INTERNAL_KEY" in lines["internal_key"]
    assert "# default" in lines["page_size"]
    for secret in ("hush", "psst", "pssst"):
        assert secret not in result.stdout


def test_a_wrong_setting_is_exit_code_2(write: Any) -> None:
    path = write("max_runing: 3\n")
    result = radixgrove("worker", "--config", path)
    assert result.returncode == 2
    assert result.stderr.startswith("Error:")
    assert radixgrove("config", "show", RADIXGROVE_CONFIG=path).returncode == 2


def test_show_is_what_a_file_would_hold() -> None:
    assert [show(value) for value in (None, True, 3, ["a", "b"])] == ["null", "true", "3", "[a, b]"]


@pytest.mark.parametrize(
    ("part", "folders"),
    [
        # Those of prompts are read of a `Prompting`, which the worker's settings are.
        ("worker", ("worker", "kernels", "service", "protocol/radixgrove/protocol/text")),
        ("router", ("router", "service")),
    ],
)
def test_no_setting_is_ignored_by_its_part(part: str, folders: tuple[str, ...]) -> None:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    source = "".join(path.read_text() for path in files)
    definition = (ROOT / "protocol/radixgrove/protocol/settings.py").read_text()
    derived = re.findall(r"self\.(\w+) or ", definition)  # as defaults by device are
    read = {*re.findall(r"(?:settings|worker|prompting)\.(\w+)", source), *derived}
    assert PARTS[part].model_fields.keys() - read == set()


def test_the_documentation_lists_every_setting_as_it_is() -> None:
    page = DOCS / "configuration.md"
    assert updated(page) == page.read_text(), "run python -m tools.reference"


@pytest.mark.parametrize("origin", ["app.example", "https://a.example/", "https://*.example", ""])
def test_what_is_no_origin_of_a_web_page_is_refused(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="cors_origins"):
        resolve("router", {"cors_origins": [origin]}, {}, EMPTY_FILE)
