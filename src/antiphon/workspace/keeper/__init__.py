"""The keeper: a process that runs commands and outlives the gateway that asked for them.

One keeper serves a state directory. A job has a directory of its own (`job_directory`), named after its key and on disk
before the command starts. When a key is requested again, an ended job returns its result, a running one is joined, and
one whose keeper died is `lost`. No key ever starts twice: a directory outlives its output until the client has
acknowledged the result.

The package is a program (`python -I -S __main__.py DIRECTORY`) and imports nothing but the standard library, so that
it stays small. It knows nothing of sessions and sandboxes: the command line and the environment come from the client
in `keeper_client`. What both sides have to agree on is here.
"""

from pathlib import Path

PROTOCOL_VERSION = 1
SOCKET_NAME = "keeper.sock"
MAX_REQUEST_BYTES = 4 * 1024 * 1024
PROGRAM_PATH = str(Path(__file__).with_name("__main__.py"))
