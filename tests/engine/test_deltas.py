"""How often what is streamed is sent: at once when it has been quiet, else gathered for an interval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from antiphon.bus import Delta, Event
from antiphon.bus.local import LocalBus
from antiphon.engine.runs.deltas import DeltaStream

pytestmark = pytest.mark.requirement("W3")

TOPIC = "session.1"


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Time:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, call))
        return self.timers[-1]

    def advance(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer.when > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.call()


class Heard(LocalBus):
    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[Delta] = []

    def has_listeners(self, topic: str) -> bool:
        return topic == TOPIC

    def publish(self, topic: str, event: Event) -> None:
        assert isinstance(event, Delta)
        self.deltas.append(event)

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: time)
    return time


@pytest.fixture
def bus() -> Heard:
    return Heard()


@pytest.fixture
def stream(time: Time, bus: Heard) -> DeltaStream:
    return DeltaStream(bus, TOPIC, "agent:main:main", "run", quiet=False, sanitized=False)


def test_pieces_are_gathered_for_forty_to_sixty_milliseconds(
    time: Time, bus: Heard, stream: DeltaStream
) -> None:
    stream.text("first")
    assert bus.texts == ["first"]  # the first word is sent at once
    for _ in range(39):
        time.advance(1)
        stream.text(".")
    stream.thinking("hm")
    assert bus.texts == ["first"]
    time.advance(21)
    assert bus.texts == ["first", "." * 39]
    assert bus.deltas[1].thinking == "hm"


def test_a_steady_stream_is_sent_at_that_rate_and_nothing_is_lost(
    time: Time, bus: Heard, stream: DeltaStream
) -> None:
    said = [f"{number} " for number in range(1200)]
    for piece in said:
        stream.text(piece)
        time.advance(1)
    assert 1200 / 60 <= len(bus.deltas) <= 1200 / 40 + 1
    stream.finish_step()
    assert "".join(bus.texts) == "".join(said)
    assert [delta.number for delta in bus.deltas] == [*range(1, len(bus.deltas) + 1)]


def test_after_a_silence_a_piece_goes_out_at_once(time: Time, bus: Heard, stream: DeltaStream) -> None:
    stream.text("one")
    time.advance(1000)
    stream.text("two")
    assert bus.texts == ["one", "two"]
    stream.text("three")
    stream.finish_step()  # the end of a step waits for no interval
    time.advance(1000)
    assert bus.texts == ["one", "two", "three"]
