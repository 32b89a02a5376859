"""Staged incidents: doctor, explain, the live page and the log name the cause first, and soon.

`incident_scenes.py` and `culprit_scenes.py` in `tests/support/stages` stage them. `doctor` looks
at the last minute.
"""

from pathlib import Path

from stages import culprit_scenes as culprits
from stages import incident_scenes as scenes
from stages.healthy_scene import found_in_health
from stages.incident_scenes import Told

from forebay.proxy.diagnose.checks import examine
from forebay.proxy.diagnose.scene import Scene, samples_of
from forebay.proxy.log_events import LogEvent

SOON_S = 65.0
"""From the begin of an incident to the line of the log that names it: two looks of the proxy."""
DOCTOR_S = 45.0  # the same to the first line of `doctor`


def assert_first(told: Told, check: str, *words: str) -> None:
    """The cause is the first line of `doctor`, and above the list of `explain`, and on the page."""
    found = told.findings
    assert found, "nothing was found"
    assert found[0].check == check, found
    for word in words:
        assert word in found[0].text, found[0].text
    assert found[0].remedy
    assert told.explained[0] == check, told.explained
    assert told.page[0] == check, told.page
    assert_soon(told, check)


def assert_soon(told: Told, check: str) -> None:
    """The cause is the first line of `doctor` within DOCTOR_S, and stays it."""
    soon = [finding.check for at, finding in told.first if at >= DOCTOR_S]
    assert set(soon) <= {check}, told.first


def assert_named(told: Told, *, explain: str = "", log: str = "", within_s: float = SOON_S) -> None:
    """The cause also stands in what `explain` lists, and first in the log, soon."""
    assert any(explain in reason for reason in (*told.slowest, *told.rejected)), told
    named = [at for at, _, line in told.events if log in line]
    assert named, told.log
    assert named[0] <= within_s, named
    found = [at for at, event, _ in told.events if at >= 0.0 and event == LogEvent.FINDING.label]
    assert not found or named[0] <= found[0], told.events


def test_an_engine_that_has_died() -> None:
    told = scenes.died()
    assert_first(told, "backends take work", "b1 has been down", "connection")
    assert_named(
        told, explain="b1 failed; sent again to b0", log="b1 is down (no connection)", within_s=10.0
    )


def test_an_engine_that_hangs() -> None:
    told = scenes.hangs()
    assert_first(told, "backends take work", "b1 has been down")
    assert told.findings[0].remedy.startswith("restart it if it hangs")
    assert_named(
        told,
        explain="b1 failed; sent again to b0",
        log="b1 is down (no health answer",
        within_s=10.0,
    )


def test_an_engine_that_is_slow() -> None:
    told = scenes.is_slow()
    assert_first(told, "speed of backends", "b1 needs", "as long as b0")
    assert any("b1 is ejected (first tokens" in line for line in told.log), told.log
    assert_named(told, log="b1 needs")


def test_an_engine_that_has_restarted_cold() -> None:
    told = scenes.restarted_cold()
    assert_first(told, "restarts", "b0 has restarted", "cache is cold")
    assert_named(told, explain="b0 failed; sent again to b1", log="b0 has restarted")


def test_a_flood_of_one_tenant(tmp_path: Path) -> None:
    told = scenes.flood(tmp_path)
    assert_first(told, "tenants", "tenant acme sent", "100% of the rejections")
    assert "tenants.known.acme.tokens_per_s" in told.findings[0].remedy
    share = "its tenant used its share of the queue"
    assert_named(told, explain=share, log="the first one of tenant acme", within_s=10.0)
    assert_named(told, log="tenant acme sent")


def test_a_stream_of_long_documents() -> None:
    told = scenes.documents()
    assert_first(told, "long documents", "bucket document", "more were rejected")
    assert_named(
        told,
        explain="the limit of bucket document",
        log="rejected: deadline_unattainable in bucket document",
    )
    assert_named(told, log="bucket document: ", within_s=90.0)


def test_a_kv_pool_that_is_too_small() -> None:
    told = scenes.small_kv_pool()
    assert_first(told, "room for KV cache", "s for room in the KV cache", "has 16,000 tokens")
    assert_named(
        told,
        explain="in the queue, its limit because it was behind earlier requests",
        log="s for room in the KV cache",
    )


def test_prefix_caching_is_off() -> None:
    told = scenes.prefix_caching_off()
    assert_first(told, "prefix caching", "b0 runs without prefix caching")
    assert_named(told, explain="tokens, 0 cached", log="prefix caching is off")


def test_a_tokenizer_that_is_slow() -> None:
    told = scenes.slow_tokenizer()
    assert_first(told, "tokenizers", "first tokens of b", "the rest is its API server")
    assert_named(told, log="the rest is its API server")


def test_clients_with_a_slow_network() -> None:
    told = scenes.slow_clients()
    assert_first(told, "network of clients", "s to send their prompts")
    assert_named(told, log="s to send their prompts")


def test_a_model_that_nobody_serves(tmp_path: Path) -> None:
    """70 answers were counted as failures of both servers."""
    told = culprits.unknown_model(tmp_path)
    assert [one.check for one in told.findings] == ["requests of clients"]
    text = "tenant acme asked 70 times for a model that nobody serves: lama-3-8b"
    assert_first(told, "requests of clients", text)
    assert_named(told, log="for a model that nobody serves: lama-3-8b")


def test_clients_that_give_up(tmp_path: Path) -> None:
    """Nothing was found, and nothing showed them."""
    told = culprits.impatient_clients(tmp_path)
    assert [one.check for one in told.findings] == ["clients that left"]
    text = "tenant acme left 44 of 88 requests before the first token, after 0.60 s in the median"
    assert_first(told, "clients that left", text)
    assert_named(told, explain="the client left", log="before the first token, after 0.60 s")


def test_a_server_that_loses_its_prefix_cache() -> None:
    """Its GPU was called slow, by prompts whose cache hits were only believed."""
    told = culprits.cold_cache()
    assert [one.check for one in told.findings] == ["prefix caching"]
    assert_first(told, "prefix caching", "b1 keeps only")
    assert_named(told, explain="tokens, 0 cached", log="b1 keeps only")


def test_equal_servers_and_short_chats() -> None:
    told = culprits.short_chats()
    assert told.findings == []
    assert told.first == []


def test_an_idle_time_out_between_proxy_and_server() -> None:
    """The failures were counted as errors of the server, without their pattern."""
    told = culprits.idle_balancer()
    assert_first(told, "idle time-outs", "connections to b1 ended after 1.2 s of silence")
    assert "errors of backends" not in [one.check for one in told.findings]
    assert_named(told, explain="b1 failed; sent again to b0", log="ended after 1.2 s of silence")


def test_a_slow_server_that_is_avoided() -> None:
    """Nothing was found: no user was slow, and half of the fleet idle."""
    told = culprits.avoided_server()
    assert_first(told, "avoided backends", "b1 got 0 requests", "times as slow")
    assert_named(told, log="b1 got ")


def test_a_server_without_the_flag_of_the_configuration() -> None:
    """The text named flags that the configuration does not state: the reverse."""
    told = culprits.without_its_flag()
    text = "b1 seems to run without --long-prefill-token-threshold"
    assert_first(told, "flags of backends", text)
    assert_named(told, log=text)


def test_a_drain_beside_a_server_that_is_down() -> None:
    """It was six findings."""
    told = culprits.drained_and_restarted()
    assert [one.check for one in told.findings] == ["backends take work", "rejections"]
    assert_first(told, "backends take work", "b0 has been down for", "b1 is draining")
    assert_named(told, log="b0 is down", within_s=10.0)


def test_a_quarter_of_an_hour_of_healthy_traffic(tmp_path: Path) -> None:
    sent, found = found_in_health(7, 0.25, tmp_path / "keys")
    assert sent > 200
    assert found == []


def test_clients_that_take_their_answers_slowly() -> None:
    found = examine(
        Scene(
            {"ready": True, "backends": [], "shedding_classes": 0, "capture": None, "usage": None,
             "share": {"links": []}, "config": {"needs_restart": [], "last_reload": ""},
             "unserved_names": {}},
            [],
            samples_of(
                'forebay_client_wait_seconds_total{direction="download"} 90.0\n'
                "forebay_time_to_first_token_seconds_count 40.0\n"
                "forebay_time_to_first_token_seconds_sum 10.0\n"
                "forebay_backend_request_duration_seconds_sum 100.0\n"
            ),
        )
    )  # fmt: skip
    assert any("slow to take their answers for 90 s, 90%" in one.text for one in found)


def test_a_proxy_that_is_short_of_cpu() -> None:
    told = scenes.short_of_cpu()
    assert_first(told, "event loop and memory", "event loop was late by more than 20 ms")
    assert_named(told, log="event loop was late by more than 20 ms")
