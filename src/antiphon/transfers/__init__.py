"""Conversations in and out as files: the `sessions.json` + JSONL layout of the OpenClaw family.

`jsonl` is the format of a transcript, `index` the format of `sessions.json`; `exports` and `imports` move
files. Nothing here starts a run: an imported conversation rests until somebody speaks in it. `moves` is another
matter: everything there is, from one database into another.
"""
