"""Keys that are accepted but have no effect, with advice on what to do instead.

They are known in related gateways, or belong to features that this release does not have: a config with them loads
with a warning for each. A test finds keys that nothing reads and that are missing from this table.
"""

from __future__ import annotations

from collections.abc import Iterator

from antiphon.config.errors import format_path
from antiphon.config.foreign_keys import find_nodes
from antiphon.config.schema import Config

_FALLBACKS_ADVICE = (
    "a model that fails is asked again, and no other in its place. Choose another as 'primary'."
)
_DELEGATION_ADVICE = "when to delegate is for the agent to judge. Say it in its 'instructions'."
_CONTROL_UI_ADVICE = (
    "this release serves no page. Name the address of one in 'gateway.controlUi.allowedOrigins'."
)

UNUSED_KEYS: dict[str, str] = {
    "session.store": "sessions are kept in one store. Use '--state-dir' to move it.",
    "session.maintenance": "nothing is pruned by itself. Use 'session.retention'.",
    "session.resetTriggers": (
        "a conversation begins anew with `/new` or `/reset` in a chat, `antiphon sessions reset` or the method"
        " 'sessions.reset'. Use these."
    ),
    "session.threadBindings": (
        "no session is bound to a thread. Use `/new`, 'session.reset' and 'session.retention' to end conversations."
    ),
    "session.dmScope": "this release has no channels whose direct chats it could keep apart. Leave it out.",
    "session.identityLinks": "this release has no channels on which people could be known. Leave it out.",
    "agents.defaults.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.defaults.subagents.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.defaults.subagents.delegationMode": _DELEGATION_ADVICE,
    "agents.list.[].model.fallbacks": _FALLBACKS_ADVICE,
    "agents.list.[].subagents.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.list.[].subagents.delegationMode": _DELEGATION_ADVICE,
    "agents.list.[].identity.avatar": "clients are given no pictures. Use 'identity.emoji'.",
    "models.providers.*.models.[].reasoning": (
        "what a model can do is known by its name. Use 'thinkingDefault' of an agent to have it think."
    ),
    "models.providers.*.models.[].input": "images are sent to every model. Leave it out.",
    "gateway.controlUi.enabled": _CONTROL_UI_ADVICE,
    "gateway.controlUi.basePath": _CONTROL_UI_ADVICE,
}

_CHANNEL_KEYS = ("session.dmScope", "session.identityLinks")
"""Keys without a warning of their own if channels are configured: the one for channels covers them."""

_HARMLESS_VALUES: tuple[object, ...] = (None, False, "", [], {}, ["text"], "main", ["/new", "/reset"])
"""Values that only ask for the existing behaviour."""


def find_unused_keys(config: Config) -> Iterator[str]:
    said = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for place, advice in UNUSED_KEYS.items():
        if config.channels and place in _CHANNEL_KEYS:
            continue
        parent, _, key = place.rpartition(".")
        for path, node in find_nodes(said, parent.split("."), ()):
            if node.get(key) not in _HARMLESS_VALUES:
                yield f"{format_path((*path, key))!r} has no effect: {advice}"
