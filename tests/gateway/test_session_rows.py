"""A session as a row on the wire: everything that its view knows, under the names that clients read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from antiphon.gateway import wire
from antiphon.operations.types import DeliveryRoute, SessionView

pytestmark = pytest.mark.requirement("W2")

LEAST = SessionView("agent:main:main", "main", "unknown", None, "id", 1, 2, "idle")

ALSO = {
    "kind": {"isMain"},
    "state": {"status", "hasActiveRun"},
    "active_run_id": {"activeRunIds"},
    "parent_key": {"spawnedBy", "parentSessionKey"},
}
"""What else of a row says the same as a field."""


def read(view: SessionView) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(wire.build_session_row(view)))


def changed(**fields: Any) -> SessionView:
    return msgspec.structs.replace(LEAST, **fields)


def test_what_is_not_known_is_left_out() -> None:
    assert read(LEAST) == {
        "key": "agent:main:main",
        "kind": "direct",
        "channel": "unknown",
        "agentId": None,
        "sessionId": "id",
        "updatedAt": 1,
        "lastActivityAt": 2,
        "state": "idle",
        "sessionKind": "main",
        "hasActiveRun": False,
        "activeRunIds": [],
        "status": "done",
        "isMain": True,
    }


@pytest.mark.parametrize("field", msgspec.structs.fields(SessionView), ids=lambda field: field.name)
def test_no_field_of_a_view_is_forgotten_or_in_the_place_of_another(field: msgspec.structs.FieldInfo) -> None:
    special = {"kind": "cron", "state": "running", "delivery_context": DeliveryRoute(channel="c", to="t")}
    mark = special.get(field.name, f"mark of {field.name}")
    row = read(changed(**{field.name: mark}))
    name = {"kind": "sessionKind"}.get(field.name, field.encode_name)
    assert row[name] == msgspec.to_builtins(mark)
    before = read(LEAST)
    others = {key for key in row | before if row.get(key) != before.get(key)} - {name}
    assert others == ALSO.get(field.name, set())


def test_a_model_is_told_apart_from_its_provider() -> None:
    found = read(changed(model="some/where/m"))
    assert (found["model"], found["modelProvider"]) == ("m", "some/where")
    alone = read(changed(model="m"))
    assert alone["model"] == "m"
    assert "modelProvider" not in alone


def test_who_adds_to_a_row_has_the_same() -> None:
    view = changed(kind="group", model="p/m", context_tokens=0, active_run_id="r", state="running")
    assert wire.build_session_dict(view) == read(view)
    assert read(view)["kind"] == "group"
