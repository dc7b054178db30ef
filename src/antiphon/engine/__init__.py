"""The engine: runs and their recovery, sessions, collaboration, outbox, jobs and retention.

Modules such as `session_rows`, `transcripts` and `lifecycle` hold transaction scripts; `run_loop` executes one run, and
`engine` processes the lanes. Nothing here depends on a wire format.
"""
