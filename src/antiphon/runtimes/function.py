"""Answers a step with a Python function, for agents written as code and for tests.

The function takes the prompt and returns a text or a whole `AssistantMessage`, or, as an async generator, yields
pieces of text. It may keep state of any kind.
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
from antiphon.messages import AssistantMessage, TextBlock
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.text import sanitize_answer

log = logging.getLogger(__name__)

_CONTRACT_HINT = (
    "Fix the function: it takes a prompt and returns text or an AssistantMessage, or yields pieces of text."
)
_LIBRARY_PATHS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

PROCESS_ENDING_ERRORS = (SystemExit, KeyboardInterrupt)
"""Exceptions that end a process, and would end it on every retry; raised by an agent's code they only fail its run."""

AgentFunction: TypeAlias = (
    Callable[[Prompt], Awaitable[str]]
    | Callable[[Prompt], Awaitable[AssistantMessage]]
    | Callable[[Prompt], AsyncGenerator[str, None]]
)


class FunctionRuntime:
    """A `Runtime` around an `AgentFunction`."""

    def __init__(self, fn: AgentFunction, *, history: bool = True, clock: Clock | None = None) -> None:
        self.reads_history = history
        self._fn = fn
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        self._clock = clock or SystemClock()

    @property
    def context_window(self) -> int | None:
        return None

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        try:
            return await self._call_function(prompt, deltas)
        except AntiphonError:
            raise
        except (Exception, *PROCESS_ENDING_ERRORS) as error:
            raise self._translate_exception(error, prompt) from error

    async def close(self) -> None:
        """Does nothing: a function holds no resources."""

    async def _call_function(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        returned: Any = self._fn(prompt)
        if isinstance(returned, AsyncGenerator):
            return self._build_text_answer(
                await _collect_pieces(cast(AsyncGenerator[str, None], returned), deltas)
            )
        if not isinstance(returned, Awaitable):
            raise self._build_error(f"returned {type(returned).__name__!r} instead of an awaitable")
        answer = await cast(Awaitable[object], returned)
        if isinstance(answer, AssistantMessage):
            answer = self._complete_answer(answer)
            deltas.text(answer.text)
            return answer
        if not isinstance(answer, str):
            raise self._build_error(f"returned {type(answer).__name__!r} instead of text")
        deltas.text(answer)
        return self._build_text_answer(answer)

    def _build_text_answer(self, text: str) -> AssistantMessage:
        return self._complete_answer(
            AssistantMessage(content=[TextBlock(text=text)], timestamp=self._clock.now())
        )

    def _complete_answer(self, answer: AssistantMessage) -> AssistantMessage:
        """The answer with defaults for the fields that the function left out."""
        return sanitize_answer(
            msgspec.structs.replace(
                answer,
                stop_reason=answer.stop_reason or ("toolUse" if answer.tool_calls else "stop"),
                api=answer.api or "function",
                provider=answer.provider or "function",
                model=answer.model or self._name,
            )
        )

    def _translate_exception(self, error: BaseException, prompt: Prompt) -> ProviderError:
        log.exception("Function agent %r failed", self._name, extra=prompt.log_fields)
        what = f"failed with {type(error).__name__}: {error}"
        place = _find_error_location(error)
        # No frame of the function: it could not be called, or its result could not be used.
        return (
            self._build_error(f"{what} ({place})", "See the log for the traceback.")
            if place
            else self._build_error(what)
        )

    def _build_error(self, what: str, hint: str = _CONTRACT_HINT) -> ProviderError:
        return ProviderError(
            f"Function agent {self._name!r} {what}.",
            hint,
            status=None,
            provider="function",
            model=self._name,
        )


def _find_error_location(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that the function's author wrote, else of the innermost one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not _is_library_file(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _is_library_file(file: str) -> bool:
    return file.startswith("<frozen ") or any(Path(file).is_relative_to(path) for path in _LIBRARY_PATHS)


async def _collect_pieces(pieces: AsyncGenerator[str, None], deltas: Deltas) -> str:
    collected: list[str] = []
    # Closed here, so that a cancelled step has run the function's own cleanup when it returns.
    async with aclosing(pieces):
        async for piece in pieces:
            deltas.text(piece)
            collected.append(piece)
    return "".join(collected)


def load_function(target: str) -> AgentFunction:
    """Imports the function named by `package.module:callable`.

    Raises:
        ConfigError: the module or name does not exist, importing it failed, or it is not callable.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _build_unusable_error(
            target, "does not have the form 'package.module:callable'", "Use that form."
        )
    try:
        found: Any = attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _build_unusable_error(
                target, f"imports {error.name!r}, which is not installed", "Install it."
            ) from error
        raise _build_unusable_error(
            target, f"names the module {module!r}, which cannot be found", "Check the name and PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise _build_unusable_error(
            target, f"names {name!r}, which {module!r} does not have", "Check the name after the colon."
        ) from error
    except (Exception, *PROCESS_ENDING_ERRORS) as error:
        raise _build_unusable_error(
            target, f"could not be imported ({type(error).__name__}: {error})", f"Fix {module!r} first."
        ) from error
    if not callable(found):
        raise _build_unusable_error(
            target, f"is a {type(found).__name__!r}, not a function", "Name an async function."
        )
    return cast(AgentFunction, found)


def _build_unusable_error(target: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"Function agent {target!r} {what}.", hint, target=target)
