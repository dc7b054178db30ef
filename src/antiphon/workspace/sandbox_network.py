"""The only way out of a sandbox with `network: "proxy"`: a proxy on the loopback inside, served from outside.

A sandbox has a network of its own that leads nowhere. Before a command starts there, `LISTENER_SCRIPT` opens a socket
on its loopback, hands it to the keeper through a descriptor and becomes the command. The keeper accepts the
connections (`keeper.host_proxy`), so inside there is neither a process of ours nor a path to a socket, and other
sandboxes cannot reach it. The socket ends with the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.host_rules import HostRules

PROXY_PORT = 3128
PROXY_PLACEHOLDER = "{proxy}"
"""Stands in a command line for the descriptor that takes the listening socket."""
LISTENER_SCRIPT = f"""
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", {PROXY_PORT}), backlog=64)
with socket.socket(fileno=int(sys.argv[1])) as keeper:
    socket.send_fds(keeper, [b"proxy"], [listener.fileno()])
listener.close()
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""

_PYTHON_PROGRAMS = ("/usr/bin/python3", "/usr/local/bin/python3")  # that a sandbox can see
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def find_python() -> str | None:
    """Return the interpreter that opens the socket inside, or None if there is none below `/usr`."""
    for program in map(Path, _PYTHON_PROGRAMS):
        if program.is_file() and program.resolve().is_relative_to("/usr"):
            return str(program)
    return None


def open_proxy_first(command: Sequence[str], python: str) -> Sequence[str]:
    """Return a command that is preceded by the opening of the proxy's socket. It must begin with a path."""
    return [python, "-I", "-S", "-c", LISTENER_SCRIPT, PROXY_PLACEHOLDER, *command]


def build_proxy_environment(allowed_hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the variables by which programs find the proxy.

    The loopback is that of the sandbox, unless the operator lists the host's.
    """
    rules, address = HostRules(allowed_hosts), f"http://127.0.0.1:{PROXY_PORT}"
    direct = ",".join(host for host in _LOOPBACK_HOSTS if not rules.names(host))
    variables = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": direct}
    return variables | {name.lower(): value for name, value in variables.items()}
