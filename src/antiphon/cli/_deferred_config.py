"""A configuration that is validated only when needed, since that takes longer than most commands do.

A section that the document does not contain has its defaults, and these few are known here without the types of
`antiphon.config`. Everything else is read from the validated configuration.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from antiphon.keys import DEFAULT_AGENT_ID, REHEARSAL_MODEL_REF

if TYPE_CHECKING:
    from antiphon.config import Config as _Config
    from antiphon.config import Secret
    from antiphon.config.sections import SessionScope, StoreSynchronous
    from antiphon.config_file import ConfigDocument
else:
    _Config = object


class DeferredConfig(_Config):
    """The configuration of a document; None stands for that of no file."""

    def __init__(self, document: ConfigDocument | None) -> None:
        self._document = document

    @cached_property
    def _validated(self) -> _Config:
        from antiphon.config import Config, load_document

        return Config() if self._document is None else load_document(self._document).config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validated, name)

    def _has_any(self, *sections: str) -> bool:
        content = self._document.content if self._document else {}
        return any(section in content for section in sections)

    @property
    def store_url(self) -> Secret | None:
        return self._validated.store_url if self._has_any("store") else None

    @property
    def store_synchronous(self) -> StoreSynchronous:
        return self._validated.store_synchronous if self._has_any("store") else "full"

    @property
    def main_key(self) -> str:
        return self._validated.main_key if self._has_any("session") else "main"

    @property
    def session_scope(self) -> SessionScope:
        return self._validated.session_scope if self._has_any("session") else "per-sender"

    @property
    def mirrors_transcripts(self) -> bool:
        has = self._has_any("session", "store", "bus")
        return self._validated.mirrors_transcripts if has else True

    @property
    def agent_ids(self) -> tuple[str, ...]:
        return self._validated.agent_ids if self._has_any("agents") else (DEFAULT_AGENT_ID,)

    @property
    def default_agent_id(self) -> str:
        return self._validated.default_agent_id if self._has_any("agents") else DEFAULT_AGENT_ID

    def uses_model(self, agent_id: str) -> bool:
        return self._validated.uses_model(agent_id) if self._has_any("agents") else True

    def get_model_ref(self, agent_id: str) -> str:
        has = agent_id != DEFAULT_AGENT_ID or self._has_any("agents", "models")
        return self._validated.get_model_ref(agent_id) if has else REHEARSAL_MODEL_REF

    def get_context_window(self, ref: str) -> int | None:
        return None if ref == REHEARSAL_MODEL_REF else self._validated.get_context_window(ref)
