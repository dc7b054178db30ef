"""The terminal chat: `command` is `antiphon chat`, `controller` runs the conversation."""
