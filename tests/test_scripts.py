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
PYTHON_ERROR = "Python 3.11 or newer is needed."


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout, with a `bin` beside it that contains only the commands the scripts rely on."""
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


def make_uv_script(checkout: Path) -> str:
    """Make a fake uv that installs stand-ins and records every call."""
    bin_dir = checkout / ".venv" / "bin"
    script = 'echo "$PWD: $*"'
    lines = (
        f'echo "$*" >> {checkout}/asked',
        f"mkdir -p {bin_dir}",
        f"echo {script!r} > {bin_dir}/antiphon",
        f"""echo 'echo "python $*" >> {checkout}/asked' > {bin_dir}/python""",
        f"{shutil.which('chmod')} +x {bin_dir}/antiphon {bin_dir}/python",
    )
    return "\n".join(lines)


def test_the_launcher_runs_through_a_link_and_prints_the_setup_once(checkout: Path, tmp_path: Path) -> None:
    write_command(tmp_path / "bin" / "uv", make_uv_script(checkout))
    (tmp_path / "elsewhere").symlink_to(checkout / "antiphon")
    first, second = (run(tmp_path / "elsewhere", "chat", "--json", cwd=tmp_path) for _ in range(2))
    assert first.stdout == second.stdout == f"{tmp_path}: chat --json\n"
    assert (first.returncode, first.stderr) == (0, "Setting up (once) …\n")
    assert (second.returncode, second.stderr) == (0, "")
    assert "--inexact" in (checkout / "asked").read_text(), "extras that were added stay"


def test_the_launcher_compiles_at_first_and_after_changes(checkout: Path, tmp_path: Path) -> None:
    write_command(tmp_path / "bin" / "uv", make_uv_script(checkout))
    asked, stamp = checkout / "asked", checkout / ".venv" / "byte-code"
    source = checkout / "src" / "changed.py"

    def ask() -> tuple[bool, bool]:
        """Run the launcher; return whether it compiled the packages, and the sources."""
        asked.unlink(missing_ok=True)
        assert run(checkout / "antiphon", "chat", cwd=tmp_path).returncode == 0
        return "--compile-bytecode" in asked.read_text(), "python -m compileall" in asked.read_text()

    def make_newer(path: Path) -> None:
        path.touch()
        later = stamp.stat().st_mtime + 1
        os.utime(path, (later, later))

    assert ask() == (True, True)
    os.utime(stamp, (later := (checkout / "uv.lock").stat().st_mtime + 1, later))
    assert ask() == (False, False)
    make_newer(source)
    assert ask() == (False, True)
    make_newer(checkout / "uv.lock")
    assert ask() == (True, True)


@pytest.mark.parametrize("python", [None, "exit 1"])
def test_the_launcher_names_the_required_python(checkout: Path, tmp_path: Path, python: str | None) -> None:
    if python:
        write_command(tmp_path / "bin" / "python3", python)  # the answer of an older version
    done = run(checkout / "antiphon", "chat", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert PYTHON_ERROR in done.stderr
    assert not (checkout / ".uv").exists()


PYTHON_WITHOUT_ENSUREPIP = """
case "$*" in
  "-m ensurepip --version") exit 1 ;;
  -c*) exit 0 ;;
  "-m venv --without-pip .uv") mkdir -p .uv/bin ;;
  "-m pip --python .uv/bin/python install "*" uv") echo "$INSTALLING" > .uv/bin/uv; {chmod} +x .uv/bin/uv ;;
  *) exit 2 ;;
esac
"""


def test_a_python_without_ensurepip_is_enough(checkout: Path, tmp_path: Path) -> None:
    """Debian has `ensurepip` in a separate package."""
    python = PYTHON_WITHOUT_ENSUREPIP.format(chmod=shutil.which("chmod"))
    write_command(
        tmp_path / "bin" / "python3", f"INSTALLING={shlex.quote(make_uv_script(checkout))}\n{python}"
    )
    done = run(checkout / "antiphon", "chat", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: chat\n")


def test_the_hint_for_a_missing_package_works_as_printed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without uv on PATH, and without the packages for developers."""
    monkeypatch.setattr(errors, "__file__", str(checkout / "src" / "antiphon" / "errors.py"))
    program, extra = shlex.split(
        errors.format_install_hint("cluster").removeprefix("Run `").removesuffix("`.")
    )
    python = PYTHON_WITHOUT_ENSUREPIP.format(chmod=shutil.which("chmod"))
    write_command(
        tmp_path / "bin" / "python3", f"INSTALLING={shlex.quote(make_uv_script(checkout))}\n{python}"
    )
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
