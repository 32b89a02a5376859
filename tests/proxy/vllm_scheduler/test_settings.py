"""The operator's settings, and the engines that are supported."""

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.proxy.vllm_scheduler.settings import check_engine, read_pause


@pytest.mark.parametrize(
    ("config", "pause"),
    [
        ({}, 0.1),
        ({"forebay": {}}, 0.1),
        ({"forebay": {"pause": 2}, "gdn_prefill_backend": "x"}, 2.0),
        ({"forebay": {"pause": 0.05}}, 0.05),
        ({"forebay": {"pause": 10}}, 10.0),
        ({"others": {"pause": 0}}, 0.1),
        (SimpleNamespace(), 0.1),  # vLLM also takes an object that can be hashed
    ],
)
def test_settings_stand_beside_those_of_others(config: Any, pause: float) -> None:
    assert read_pause(config) == pause


@pytest.mark.parametrize(
    "pause", [0, 0.0005, -1, 60.5, "abc", "0.1", None, True, [], float("nan"), float("inf")]
)
def test_a_bad_pause_is_one_clear_error(pause: Any) -> None:
    with pytest.raises(ValueError, match=r"forebay.*pause is .*give seconds between 0.001 and 60$"):
        read_pause({"forebay": {"pause": pause}})


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(ValueError, match='has no setting "pauses"; there is "pause"'):
        read_pause({"forebay": {"pauses": 1}})
    with pytest.raises(ValueError, match="give an object"):
        read_pause({"forebay": 0.1})


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc0", "0.29.0.dev3"])
def test_a_known_version_is_accepted(version: str) -> None:
    check_engine(version, SimpleNamespace())


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev", "0"])
def test_another_version_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"knows vLLM 0.26 to 0.33, and this is .*; start without"):
        check_engine(version, SimpleNamespace())


def test_a_diffusion_model_is_refused() -> None:
    with pytest.raises(ValueError, match="diffusion"):
        check_engine("0.33.0", SimpleNamespace(diffusion_config=object()))
