"""A copy of a request keeps every field that it does not change."""

import ast
from typing import Any

import pytest
from paths import ROOT

from forebay.proxy.core.model import Request

# A value for each type of a field, unlike the default of any field.
OTHER: dict[str, Any] = {
    "bool": False,
    "float": 7.5,
    "int": 7,
    "ServiceClass": "batch",
    "str": "other",
    "tuple[int, ...]": (7,),
}


def all_fields() -> dict[str, Any]:
    """Return another value for each field, from the source: compiled code has no signatures."""
    tree = ast.parse((ROOT / "proxy" / "core" / "model.py").read_text())
    (made,) = (node for node in tree.body if getattr(node, "name", "") == "Request")
    (init,) = (node for node in ast.walk(made) if getattr(node, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    return {arg.arg: OTHER[ast.unparse(arg.annotation)] for arg in init.args.args if arg.annotation}


FIELDS = all_fields()


def fields_of(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in FIELDS}


def test_a_copy_has_every_field() -> None:
    assert fields_of(Request(**FIELDS).with_()) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_concerns_its_field_only(name: str) -> None:
    plain = Request("plain", 1)
    changed = fields_of(plain.with_(**{name: FIELDS[name]}))
    assert changed == {**fields_of(plain), name: FIELDS[name]}
    assert changed != fields_of(plain)
