"""Sources of the configuration, and the one-line error for each mistake."""

from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from forebay.analysis.demo.processes import proxy_config
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import config_yaml, load_config
from forebay.traces.ground.errors import InputError

ONE = {"backends": [{"url": "http://127.0.0.1:8001"}]}


def in_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "proxy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    path = in_file(
        tmp_path,
        """
listen: {host: 127.0.0.1, port: 8080, admin_port: 9090}
backends:
  - {name: gpu0, url: "http://127.0.0.1:8001", max_concurrency: 64}
  - {name: gpu1, url: "http://127.0.0.1:8002/", max_concurrency: 32}
buckets:
  - {name: chat, up_to: 5000, max_queue: 256, max_wait: 2s}
  - {name: document, up_to: 131072, max_queue: 64, max_wait: 30s, prefills_per_backend: 1,
     backends: [gpu0, gpu1]}
affinity: {block_bytes: 2048, min_match: 0.25, max_imbalance: 1.25, kv_tokens: auto}
timeouts: {connect: 2s, first_token: 120s, idle: 60s, client_headers: 10s, client_body: 30s,
           client_write: 30s, drain: 300ms}
limits: {body: 16MiB, header: 16KiB, connections: auto, queue_bytes: 256MiB}
""",
    )
    config = load_config(path, {}, {})
    assert [b.name for b in config.backends] == ["gpu0", "gpu1"]
    assert config.backends[1].url == "http://127.0.0.1:8002"
    assert config.timeouts.drain == pytest.approx(0.3)
    assert config.limits.body == 16 << 20
    chat, document = config.core_buckets()
    assert (chat.max_wait_s, chat.prefills_per_backend) == (2.0, inf)
    assert (document.prefills_per_backend, document.backends) == (1, ("gpu0", "gpu1"))
    assert config.core_backends()[1].max_concurrency == 32
    assert config.core_backends()[0].kv_tokens == inf
    assert config.max_connections() > 0


def test_the_demo_runs_the_default_configuration(tmp_path: Path) -> None:
    measured = load_config(in_file(tmp_path, proxy_config(["http://127.0.0.1:8001"], 1.0)), {}, {})
    default = Config.model_validate(ONE)
    for key, value in default.model_dump(exclude={"listen", "backends", "debug_headers"}).items():
        assert measured.model_dump()[key] == value, key
    (theirs,), (ours,) = measured.backends, default.backends
    assert theirs.model_copy(update={"name": ours.name}) == ours
    bounded = proxy_config(["http://127.0.0.1:8001"], 1.0, bounded=True)
    assert load_config(in_file(tmp_path, bounded), {}, {}).backends[0].scheduler == "forebay"


def test_a_target_follows_max_wait() -> None:
    """At most 15 s, so that files from before there were targets mean what they meant."""
    buckets = [
        {"name": "chat", "up_to": 100, "max_wait": "2s"},
        {"name": "document", "up_to": 200, "max_wait": "30s"},
        {"name": "long", "up_to": 300, "max_wait": "5s", "target": "40s"},
    ]
    config = Config.model_validate({**ONE, "buckets": buckets})
    assert [bucket.target_s for bucket in config.core_buckets()] == [2.0, 15.0, 40.0]
    assert [bucket.patience_s for bucket in config.core_buckets()] == [2.0, 15.0, 5.0]
    chat, document = Config.model_validate(ONE).core_buckets()
    assert (chat.target_s, document.target_s, chat.max_wait_s) == (2.0, 15.0, 30.0)


@pytest.mark.parametrize("target", [0, -1, "0s", "soon"])
def test_a_target_is_a_time_above_zero(target: object) -> None:
    with pytest.raises(ValidationError, match="target"):
        Config.model_validate({"buckets": [{"name": "a", "up_to": 9, "target": target}]})


def test_a_printed_configuration_can_be_read_again(tmp_path: Path) -> None:
    odd = {"timeouts": {"idle": 1234.5678, "drain": 0.0123}, "limits": {"body": 16_777_217}}
    config = load_config(None, {**ONE, **odd, "upstream_api_key": "hush"}, {})
    text = config_yaml(config)
    assert "hush" not in text
    assert "dispatch_ahead: 300ms\n" in text
    assert "header: 16KiB\n" in text
    assert "drain: 12.3ms\n" in text
    again = load_config(in_file(tmp_path, text), {}, {})
    assert again.model_copy(update={"upstream_api_key": None}) == config.model_copy(
        update={"upstream_api_key": None}
    )


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = in_file(tmp_path, "listen: {port: 1, admin_port: 2}\nreject_status: 503\n")
    environ = {
        "FOREBAY_LISTEN__ADMIN_PORT": "3",
        "FOREBAY_LISTEN__PORT": "4",
        "FOREBAY_BACKENDS": '[{url: "http://127.0.0.1:1"}]',
        "FOREBAY_API_KEY": "not ours",
        "HOME": "/",
    }
    config = load_config(path, {"listen": {"port": 5}}, environ)
    assert (config.listen.port, config.listen.admin_port) == (5, 3)
    assert (config.reject_status, config.listen.host) == (503, "127.0.0.1")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"limits": {"bodyy": 1}}, "limits.bodyy: unknown key; did you mean body?"),
        ({"listn": {}}, "listn: unknown key; did you mean listen?"),
        ({"backends": [{"url": "http://h:1", "nme": "x"}]}, "backends.0.nme: unknown key"),
        (
            {"tenants": {"known": {"alice": {"tokens_per_minute": 20}}}},
            "tenants.known.alice.tokens_per_minute: unknown key; did you mean tokens_per_s?",
        ),
        ({"listen": {"port": 9090}}, "listen: port and admin_port are both 9090; give two"),
        ({"timeouts": {"idle": "9999999h"}}, "timeouts.idle: '9999999h': give 31622400 or less"),
        ({"limits": {"body": 1 << 60}}, "limits.body: 1152921504606846976: give 1125899906842624"),
        ({"listen": {"port": "eighty"}}, "listen.port: 'eighty': "),
        ({"listen": {"port": 70000}}, "listen.port: 70000: "),
        ({"backends": [{"url": "localhost:8001"}]}, "give a URL such as http://127.0.0.1:8001"),
        ({"backends": [{"url": "http://h:99999"}]}, "give a URL"),
        ({"backends": [{"url": "ftp://h:1"}]}, "give a URL"),
        ({"backends": [{"url": "http://h:1/v1"}]}, "with no path"),
        ({"backends": [{"url": "http://u@h:1"}]}, "without user or password"),
        ({"backends": [{"url": "http://gpu0..svc:8001"}]}, "not a host name: give it in ASCII"),
        ({"backends": [{"url": f"http://{'a' * 64}:8001"}]}, "1 to 63 characters between dots"),
        ({"backends": [{"url": "http://gpü:8001"}]}, "not a host name: give it in ASCII"),
        ({"backends": [{"url": "http://\u212a:8001"}]}, "not a host name"),  # lower: an ASCII k
        ({"backends": [{"name": "a"}]}, "backends.0.url: missing"),
        ({"backends": [{"url": "http://h:1"}, {"url": "http://h:1"}]}, "given twice"),
        ({"buckets": []}, "give at least one bucket"),
        (
            {"buckets": [{"name": "a", "up_to": 9}, {"name": "b", "up_to": 9}]},
            "up_to must grow",
        ),
        ({"buckets": [{"name": "a", "up_to": 9, "backends": ["x"]}]}, "'x' is no backend"),
        ({"buckets": [{"name": "a", "up_to": 9, "max_wait": "soon"}]}, "a duration such as 2s"),
        ({"limits": {"body": "big"}}, "a size such as 16MiB"),
        ({"timeouts": {"idle": 0}}, "timeouts.idle: 0: "),
        ({"routing": "random"}, "routing: 'random': one of warm_or_least_work"),
        ({"routes": ["/v1/../x"]}, "is not a plain path"),
        ({"routes": ["/sleep"]}, "'/sleep' lets any client change or stop a server; leave it out"),
        ({"affinity": {"min_match": 2}}, "affinity.min_match: 2: "),
        ({"affinity": {"kv_tokens": 0}}, "affinity.kv_tokens: 0: 'auto' or: "),
        ({"limits": {"memory": "big"}}, "limits.memory: 'big': 'auto' or: give a size"),
        ({"capture": {"salt": "pepper"}}, "capture.salt: 'pepper'"),
        ({"reject_status": 500}, "reject_status: 500: "),
        ({"backends": []}, "no backend: give --backend"),
        ({"limits": {"bodyy": 1}, "listn": 1}, "did you mean body?; listn: unknown key"),
        ({f"odd{n}": n for n in range(5)}, "odd4: unknown key"),
        ({f"odd{n}": n for n in range(12)}, "(and 2 more)"),
    ],
)
def test_mistakes(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    path = in_file(tmp_path, yaml.safe_dump({**ONE, **values}))
    with pytest.raises(InputError) as error:
        load_config(path, {}, {})
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    if "no backend" not in words:
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "host", ["gpu_0.svc.", "a" * 63, "[::1]", "[fe80::1%25eth0]", "xn--gp-yka"]
)
def test_hosts_that_can_be_looked_up(host: str) -> None:
    url = f"http://{host}:8001"
    assert load_config(None, {"backends": [{"url": url}]}, {}).backends[0].url == url


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "not valid YAML"), ("- 1", "give keys and values"), ("\tx: 1", ":1: ")],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        load_config(in_file(tmp_path, text), {}, {})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "none.yaml", {}, {})


def test_the_environment_is_named_when_it_is_wrong() -> None:
    with pytest.raises(InputError, match=r"^FOREBAY_LISTEN__PORT: listen.port: 'x'"):
        load_config(None, ONE, {"FOREBAY_LISTEN__PORT": "x"})
    with pytest.raises(InputError, match=r"^FOREBAY_LISTN: listn: unknown key"):
        load_config(None, ONE, {"FOREBAY_LISTN": "1"})


def service_links(service: str) -> dict[str, str]:
    """Return the variables of a Service with a named port (kubelet's envvars.FromServices)."""
    name = service.upper().replace("-", "_")
    port = f"{name}_PORT_8080_TCP"
    return {
        f"{name}_SERVICE_HOST": "10.0.0.7",
        f"{name}_SERVICE_PORT": "8080",
        f"{name}_SERVICE_PORT_HTTP_ADMIN": "8080",
        f"{name}_PORT": "tcp://10.0.0.7:8080",
        port: "tcp://10.0.0.7:8080",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "8080",
        f"{port}_ADDR": "10.0.0.7",
    }


@pytest.mark.parametrize("service", ["forebay", "forebay-gateway", "forebay-2-eu"])
def test_service_links_of_kubernetes_are_no_keys(service: str) -> None:
    plain = load_config(None, ONE, {})
    assert load_config(None, ONE, service_links(service)) == plain


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FOREBAY_PORT", "8081", "port: unknown key; did you mean FOREBAY_LISTEN__PORT?"),
        ("FOREBAY_ADMIN_PORT", "9", "did you mean FOREBAY_LISTEN__ADMIN_PORT?"),
        ("FOREBAY_LISTEN__PORT", "tcp://10.0.0.7:8080", "listen.port: 'tcp://10.0.0.7:8080': "),
        ("FOREBAY_TIMEOUTS_FIRST_TOKEN", "9s", "did you mean FOREBAY_TIMEOUTS__FIRST_TOKEN?"),
        ("FOREBAY_LISTEN__PROT", "8081", "listen.prot: unknown key; did you mean port?"),
        ("FOREBAY_LISTN__PORT", "8081", "listn: unknown key; did you mean listen?"),
        ("FOREBAY_SERVICE", "x", "FOREBAY_SERVICE: service: unknown key"),
        ("FOREBAY_HOME", "/srv", "FOREBAY_HOME: home: unknown key"),
    ],
)
def test_other_variables_that_are_no_keys(name: str, value: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        load_config(None, ONE, {name: value})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_backend_the_keys_can_still_be_seen() -> None:
    config = load_config(None, {}, {}, to_serve=False)
    assert yaml.safe_load(config_yaml(config))["backends"] == []
    with pytest.raises(InputError, match="no backend"):
        load_config(None, {}, {})


@pytest.mark.parametrize(
    "given",
    [
        {"share": "http://u:secretpw@h"},
        {"backends": [{"url": "http://u:secretpw@h:1"}]},
        {"backends": [{"url": "http://:secretpw@h:1"}]},
        {"backends": [{"url": "u:secretpw@h:1"}]},
        {"backends": [{"url": "ftp://u:secret@secretpw/x@h:1"}]},
        {"backends": "http://u:secretpw@h:1"},
        {"cors_origins": ["https://u:secretpw@h/"]},
        {"routes": ["http://u:secretpw@h/"]},
        {"upstream_api_key": ["secretpw"]},
    ],
)
def test_no_mistake_repeats_a_password(given: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        load_config(None, {**ONE, **given}, {})
    assert "secret" not in str(error.value)
    assert next(iter(given)) in str(error.value)  # but it says where to look
    (key, value) = next(iter(given.items()))
    with pytest.raises(InputError) as error:
        load_config(None, ONE if key != "backends" else {}, {f"FOREBAY_{key.upper()}": str(value)})
    assert "secret" not in str(error.value)


def test_no_password_of_a_url_is_printed() -> None:
    endpoint = "http://u:secretpw@h:4318/v1/traces"
    printed = config_yaml(load_config(None, {**ONE, "tracing": {"endpoint": endpoint}}, {}))
    assert "endpoint: http://***@h:4318/v1/traces" in printed


def test_variables_of_the_build_are_no_keys() -> None:
    assert load_config(None, ONE, {"FOREBAY_COMPILE": "1"}) == load_config(None, ONE, {})


@pytest.mark.parametrize(
    ("timeouts", "whole_s"),
    [({}, 600), ({"first_token": "10s"}, 50), ({"first_token": "10s", "answer": "70s"}, 70)],
)
def test_a_whole_answer_has_a_multiple_of_the_first_token(
    timeouts: dict[str, str], whole_s: float
) -> None:
    assert load_config(None, {**ONE, "timeouts": timeouts}, {}).timeouts.whole_answer == whole_s


@pytest.mark.parametrize(
    ("keys", "chunk_tokens"),
    [
        ({}, float("inf")),
        ({"scheduler": "forebay"}, 2048),
        ({"scheduler": "forebay", "long_prefill_token_threshold": 512}, 512),
        ({"scheduler": "vllm", "long_prefill_token_threshold": 4096}, 4096),
    ],
)
def test_a_server_with_forebays_scheduler_lets_short_prompts_pass(
    keys: dict[str, Any], chunk_tokens: float
) -> None:
    config = Config.model_validate({"backends": [{"url": "http://h:1", **keys}]})
    (spec,) = config.core_backends()
    assert (spec.chunk_tokens, spec.scheduler) == (chunk_tokens, keys.get("scheduler", "vllm"))
