"""The example configuration and the manual are complete and valid."""

import re

import pytest
import yaml
from pages.exported_metrics import exported_metrics
from paths import ROOT

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.proxy_cli import app
from forebay.traces.ground.command_line.command import run_command

DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "forebay.yaml"


def test_the_example_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(app, "proxy", ["--config", str(EXAMPLE), "--check-config"]) == 0
    assert "valid" in capsys.readouterr().err


def test_the_example_names_what_is_not_a_default() -> None:
    """A value of the file is the default, or its line says what is."""
    text = EXAMPLE.read_text(encoding="utf-8")
    example, default = load_config(EXAMPLE, {}, {}), Config()
    for section, model in default:
        ours = getattr(example, section)
        if section == "backends":
            given = ours[1].model_dump() | {"name": "", "url": "http://h:1"}
            assert given == BackendConfig(url="http://h:1").model_dump()
        elif not hasattr(model, "model_dump"):
            assert ours == model, section
        else:
            for key in type(model).model_fields:
                if getattr(ours, key) != getattr(model, key):
                    lines = re.findall(rf"^  {key}: .*$", text, re.MULTILINE)
                    assert any("default" in line for line in lines), key


def test_the_example_names_pages_that_exist() -> None:
    pages = re.findall(r"docs/[\w./-]+\.md", EXAMPLE.read_text(encoding="utf-8"))
    assert len(pages) >= 4
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_the_example_shows_every_section() -> None:
    given = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert set(Config.model_fields) <= set(given) | {"upstream_api_key"}
    config = load_config(EXAMPLE, {}, {})
    for section in (
        *("listen", "timeouts", "limits", "health", "affinity", "logs", "tracing"),
        *("tenants", "tls", "upstream_tls", "capture"),
    ):
        fields = set(type(getattr(config, section)).model_fields) - {"max_imbalance"}  # no effect
        assert set(given[section]) == fields, section
    shown = {key for backend in given["backends"] for key in backend}
    assert shown == set(BackendConfig.model_fields)


def test_every_metric_is_in_the_manual() -> None:
    """And nothing else is: a renamed one would leave a dead alert behind."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    ours = {
        family.name: family.type for family in exported_metrics() if "process" not in family.name
    }
    named = {f"{name}_total" if type_ == "counter" else name for name, type_ in ours.items()}
    # What a rule or a table may name of a histogram is its buckets.
    found = {
        name.removesuffix("_bucket")
        for name in re.findall(r"\b(?:forebay|gen_ai)_[a-z_]+(?=[`{\[ >)])", text)
    } - {"gen_ai_operation_name", "gen_ai_token_type"}
    assert found == named
