"""Import and export of conversations as files, in the `sessions.json` + JSONL layout of the OpenClaw family.

`jsonl` is the format of a transcript, `sessions_index` that of `sessions.json`. `import_source` reads what can be
imported and `imports` stores it; `exports` and `mirror` write files. Nothing here starts a run: an imported
conversation is idle until it gets a message. `postgres_migration` is separate: it copies a whole database into another.
"""
