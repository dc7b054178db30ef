"""The terminal chat: `command` is `antiphon chat`, `controller` holds the conversation."""
