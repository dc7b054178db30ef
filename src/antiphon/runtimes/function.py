"""Answers a step with a Python function: for agents that are code, and for tests.

The function is given the prompt and gives back a text, a whole `Assistant`, or, as an async generator, pieces
of text. It keeps whatever state it likes; nothing is put between it and the engine.
"""

from __future__ import annotations

import importlib
import logging
import sysconfig
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from antiphon.clock import Clock, SystemClock
from antiphon.errors import AntiphonError, ConfigError, ProviderError
from antiphon.messages import Assistant, Text
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.answers import sound

log = logging.getLogger(__name__)

_CONTRACT = "Mend the function: it takes a prompt and answers with a text, an Assistant, or pieces of text."
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

ENDINGS = (SystemExit, KeyboardInterrupt)
"""What ends a process, and would end it again whenever the run is taken up. Code of others may end its run."""

Agent: TypeAlias = (
    Callable[[Prompt], Awaitable[str]]
    | Callable[[Prompt], Awaitable[Assistant]]
    | Callable[[Prompt], AsyncGenerator[str, None]]
)


class FunctionRuntime:
    """A `Runtime` around an `Agent` function."""

    def __init__(self, fn: Agent, *, history: bool = True, clock: Clock | None = None) -> None:
        self.reads_history = history
        self._fn = fn
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        self._clock = clock or SystemClock()

    @property
    def context_window(self) -> int | None:
        return None

    async def step(self, prompt: Prompt, deltas: Deltas) -> Assistant:
        try:
            return await self._answer(prompt, deltas)
        except AntiphonError:
            raise
        except (Exception, *ENDINGS) as error:
            raise self._raised(error, prompt) from error

    async def close(self) -> None:
        """There is nothing to close."""

    async def _answer(self, prompt: Prompt, deltas: Deltas) -> Assistant:
        given: Any = self._fn(prompt)
        if isinstance(given, AsyncGenerator):
            return self._said(await _collect(cast(AsyncGenerator[str, None], given), deltas))
        if not isinstance(given, Awaitable):
            raise self._failure(f"gave back {type(given).__name__!r} instead of something to await")
        answer = await cast(Awaitable[object], given)
        if isinstance(answer, Assistant):
            answer = self._completed(answer)
            deltas.text(answer.text)
            return answer
        if not isinstance(answer, str):
            raise self._failure(f"answered with {type(answer).__name__!r} instead of a text")
        deltas.text(answer)
        return self._said(answer)

    def _said(self, text: str) -> Assistant:
        return self._completed(Assistant(content=[Text(text=text)], timestamp=self._clock.now()))

    def _completed(self, answer: Assistant) -> Assistant:
        """The answer with what the function need not say."""
        return sound(
            msgspec.structs.replace(
                answer,
                stop_reason=answer.stop_reason or ("toolUse" if answer.tool_calls else "stop"),
                api=answer.api or "function",
                provider=answer.provider or "function",
                model=answer.model or self._name,
            )
        )

    def _raised(self, error: BaseException, prompt: Prompt) -> ProviderError:
        log.exception("Function agent %r failed", self._name, extra=prompt.about)
        what = f"failed with {type(error).__name__}: {error}"
        place = _place(error)
        # Nowhere in the function: it could not be called, or what it gave could not be used.
        return (
            self._failure(f"{what} ({place})", "See the log for the traceback.")
            if place
            else self._failure(what)
        )

    def _failure(self, what: str, hint: str = _CONTRACT) -> ProviderError:
        return ProviderError(
            f"Function agent {self._name!r} {what}.",
            hint,
            status=None,
            provider="function",
            model=self._name,
        )


def _place(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that the function's author wrote, else of the innermost one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _is_library(file: str) -> bool:
    return file.startswith("<frozen ") or any(Path(file).is_relative_to(path) for path in _LIBRARIES)


async def _collect(pieces: AsyncGenerator[str, None], deltas: Deltas) -> str:
    said: list[str] = []
    # Closed here, so that a cancelled step has run the function's own clean-up when it returns.
    async with aclosing(pieces):
        async for piece in pieces:
            deltas.text(piece)
            said.append(piece)
    return "".join(said)


def load(target: str) -> Agent:
    """The function that `package.module:callable` names.

    Raises:
        ConfigError: there is no such module or name, importing it failed, or it cannot be called.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _unusable(target, "is not of the form 'package.module:callable'", "Write it in that form.")
    try:
        found: Any = attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _unusable(
                target, f"imports {error.name!r}, which is not installed", "Install it."
            ) from error
        raise _unusable(
            target, f"names the module {module!r}, which cannot be found", "Check the name and PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise _unusable(
            target, f"finds no {name!r} in {module!r}", "Check the name after the colon."
        ) from error
    except (Exception, *ENDINGS) as error:
        raise _unusable(
            target, f"could not be imported ({type(error).__name__}: {error})", f"Mend {module!r} first."
        ) from error
    if not callable(found):
        raise _unusable(target, f"is a {type(found).__name__!r}, not a function", "Name an async function.")
    return cast(Agent, found)


def _unusable(target: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"Function agent {target!r} {what}.", hint, target=target)
