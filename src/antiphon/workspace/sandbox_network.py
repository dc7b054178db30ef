"""The only ways out of a sandbox: sockets on the loopback inside that are served from outside.

A sandbox has a network of its own that leads nowhere. Before a command starts there, `LISTENER_SCRIPT` opens a socket
on its loopback, hands it out through a descriptor and becomes the command. So inside there is neither a process of ours
nor a path to a socket, and other sandboxes cannot reach it. The socket ends with the command.

With `network: "proxy"` one leads to the proxy for listed hosts (`keeper.host_proxy`). Programs of ACP agents have one
to the tools of their session, whatever their network is; the gateway itself answers there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.host_rules import HostRules

PROXY_PORT = 3128
PROXY_PLACEHOLDER = "{proxy}"
"""Stands in a command line for the descriptor that takes the listening socket."""
TOOLS_HOST = "127.0.0.2"
"""Another address of the loopback, so that it is reached directly even if 127.0.0.1 stands for the host's."""
TOOLS_PORT = 3129
TOOLS_PLACEHOLDER = "{tools}"
LISTENER_SCRIPT = """
import os, signal, socket, sys
listener = socket.create_server((sys.argv[2], int(sys.argv[3])), backlog=64)
with socket.socket(fileno=int(sys.argv[1])) as outside:
    socket.send_fds(outside, [b"listener"], [listener.fileno()])
listener.close()
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execv(sys.argv[4], sys.argv[4:])
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
    return [*_open_listener(python, PROXY_PLACEHOLDER, "127.0.0.1", PROXY_PORT), *command]


def open_tools_first(command: Sequence[str], python: str) -> Sequence[str]:
    """Return a command that is preceded by the opening of the socket for its session's tools."""
    return [*_open_listener(python, TOOLS_PLACEHOLDER, TOOLS_HOST, TOOLS_PORT), *command]


def _open_listener(python: str, placeholder: str, host: str, port: int) -> Sequence[str]:
    return [python, "-I", "-S", "-c", LISTENER_SCRIPT, placeholder, host, str(port)]


def build_proxy_environment(allowed_hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the variables by which programs find the proxy.

    The loopback is that of the sandbox, unless the operator lists the host's.
    """
    rules, address = HostRules(allowed_hosts), f"http://127.0.0.1:{PROXY_PORT}"
    direct = ",".join([*(host for host in _LOOPBACK_HOSTS if not rules.names(host)), TOOLS_HOST])
    variables = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": direct}
    return variables | {name.lower(): value for name, value in variables.items()}
