"""The scripts of a checkout, with stand-ins for what they would install."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon import errors

ROOT = Path(__file__).parent.parent
NEEDED = "Python 3.11 or newer is needed."


def command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout, and beside it a `bin` with nothing in it but what scripts take for granted."""
    for name in ("antiphon", "scripts/uv", "scripts/extra"):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    (tmp_path / "checkout" / "src").mkdir()
    (tmp_path / "checkout" / "uv.lock").touch()
    for name in ("bash", "dirname", "readlink", "mkdir", "rm", "find", "touch"):
        found = shutil.which(name)
        assert found
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(found)
    return tmp_path / "checkout"


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": str(cwd / "bin"), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        [program, *arguments], cwd=cwd, env=environ, check=False, capture_output=True, text=True, timeout=60
    )


def installing(checkout: Path) -> str:
    """What a uv does that installs stand-ins and writes down what it and they were asked."""
    made = checkout / ".venv" / "bin"
    script = 'echo "$PWD: $*"'
    lines = (
        f'echo "$*" >> {checkout}/asked',
        f"mkdir -p {made}",
        f"echo {script!r} > {made}/antiphon",
        f"""echo 'echo "python $*" >> {checkout}/asked' > {made}/python""",
        f"{shutil.which('chmod')} +x {made}/antiphon {made}/python",
    )
    return "\n".join(lines)


def test_it_runs_through_a_link_and_says_once_that_it_sets_up(checkout: Path, tmp_path: Path) -> None:
    command(tmp_path / "bin" / "uv", installing(checkout))
    (tmp_path / "elsewhere").symlink_to(checkout / "antiphon")
    first, second = (run(tmp_path / "elsewhere", "chat", "--json", cwd=tmp_path) for _ in range(2))
    assert first.stdout == second.stdout == f"{tmp_path}: chat --json\n"
    assert (first.returncode, first.stderr) == (0, "Setting up (once) …\n")
    assert (second.returncode, second.stderr) == (0, "")
    assert "--inexact" in (checkout / "asked").read_text(), "extras that were added stay"


def test_it_writes_byte_code_at_first_and_for_what_has_changed(checkout: Path, tmp_path: Path) -> None:
    command(tmp_path / "bin" / "uv", installing(checkout))
    asked, stamp = checkout / "asked", checkout / ".venv" / "byte-code"
    source = checkout / "src" / "changed.py"

    def ask() -> tuple[bool, bool]:
        """Whether it compiled the packages, and the sources."""
        asked.unlink(missing_ok=True)
        assert run(checkout / "antiphon", "chat", cwd=tmp_path).returncode == 0
        return "--compile-bytecode" in asked.read_text(), "python -m compileall" in asked.read_text()

    def is_newer(path: Path) -> None:
        path.touch()
        later = stamp.stat().st_mtime + 1
        os.utime(path, (later, later))

    assert ask() == (True, True)
    os.utime(stamp, (later := (checkout / "uv.lock").stat().st_mtime + 1, later))
    assert ask() == (False, False)
    is_newer(source)
    assert ask() == (False, True)
    is_newer(checkout / "uv.lock")
    assert ask() == (True, True)


@pytest.mark.parametrize("python", [None, "exit 1"])
def test_it_says_which_python_is_needed(checkout: Path, tmp_path: Path, python: str | None) -> None:
    if python:
        command(tmp_path / "bin" / "python3", python)  # as an old one answers when it is asked its age
    done = run(checkout / "antiphon", "chat", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert NEEDED in done.stderr
    assert not (checkout / ".uv").exists()


BARE = """
case "$*" in
  "-m ensurepip --version") exit 1 ;;
  -c*) exit 0 ;;
  "-m venv --without-pip .uv") mkdir -p .uv/bin ;;
  "-m pip --python .uv/bin/python install "*" uv") echo "$INSTALLING" > .uv/bin/uv; {chmod} +x .uv/bin/uv ;;
  *) exit 2 ;;
esac
"""


def test_a_python_that_cannot_put_pip_anywhere_is_enough(checkout: Path, tmp_path: Path) -> None:
    """As Debian's, which has `ensurepip` in another package."""
    python = BARE.format(chmod=shutil.which("chmod"))
    command(tmp_path / "bin" / "python3", f"INSTALLING={shlex.quote(installing(checkout))}\n{python}")
    done = run(checkout / "antiphon", "chat", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: chat\n")


def test_the_hint_for_a_missing_package_works_as_printed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without uv on the path, and without the packages that only developers need."""
    monkeypatch.setattr(errors, "__file__", str(checkout / "src" / "antiphon" / "errors.py"))
    program, extra = shlex.split(
        errors.format_install_hint("cluster").removeprefix("Run `").removesuffix("`.")
    )
    python = BARE.format(chmod=shutil.which("chmod"))
    command(tmp_path / "bin" / "python3", f"INSTALLING={shlex.quote(installing(checkout))}\n{python}")
    done = run(Path(program), extra, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = (checkout / "asked").read_text().splitlines()[0].split()
    assert asked[0] == "sync"
    assert {"--no-dev", "--inexact", "--extra", "cluster"} <= set(asked)


def test_outside_a_checkout_the_hint_names_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "antiphon" / "errors.py"))
    assert shlex.join(
        [sys.executable, "-m", "pip", "install", "antiphon[cluster]"]
    ) in errors.format_install_hint("cluster")
