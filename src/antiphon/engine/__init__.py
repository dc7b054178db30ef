"""What happens to sessions: runs, their recovery, waits, usage and retention.

Modules named by a noun hold transaction scripts over that noun's rows (`session_rows`, `transcripts`, `lifecycle`);
`run_loop` plays one run, `engine` keeps lanes moving. Nothing here knows a wire format or a tool's name.
"""
