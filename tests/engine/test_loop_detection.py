"""Tool calls that a run repeats without any change: told to the model, then refused, then the end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config import parse
from antiphon.config.agents import LoopDetectionSettings
from antiphon.engine.runs.loop_detection import CallRecord, RepeatedCalls, count_repeats, decide_repeat
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import ConfigError
from antiphon.messages import AssistantMessage, ImageBlock, TextBlock, ToolCall, ToolResult
from antiphon.runtimes import Prompt
from support.app_fixture import make_answer, make_tool, make_tool_calls, open_app_fixture

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("LOOP")]

SMALL = LoopDetectionSettings(
    history_size=8, warning_threshold=3, critical_threshold=5, global_circuit_breaker_threshold=7
)
CALLS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=40)


def make_call(number: int, argument: str) -> ToolCall:
    return ToolCall(id=f"call_{number}", name="work", arguments={"argument": argument})


def make_result(call: ToolCall, output: ToolOutput) -> ToolResult:
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        content=[TextBlock(text=output.text)],
        timestamp=1,
        is_error=output.is_error,
        details=output.details,
    )


def describe_by_hand(attempts: list[tuple[str, str]]) -> list[str]:
    """What has to happen to each attempt (a call and the result that it would have), told in the simplest way."""
    history: list[tuple[str, str]] = []
    verdicts: list[str] = []
    for call, result in attempts:
        window = [was for was in history[-SMALL.history_size :] if was[0] == call]
        same = 0
        while same < len(window) and window[-1 - same] == window[-1]:
            same += 1
        if same + 1 >= SMALL.global_circuit_breaker_threshold:
            return [*verdicts, "end"]
        if same + 1 >= SMALL.critical_threshold:
            verdicts.append("refuse")
            history.append(window[-1])
            continue
        history.append((call, result))
        is_same = bool(window) and window[-1] == (call, result)
        # The window holds one more call now, so an old one may have left it.
        left = [was for was in history[-SMALL.history_size :] if was == (call, result)]
        count = min(same + 1 if is_same else 1, len(left))
        verdicts.append("warn" if count >= SMALL.warning_threshold else "run")
    return verdicts


@given(CALLS)
def test_a_call_is_counted_as_long_as_it_has_the_same_result(attempts: list[tuple[str, str]]) -> None:
    repeated, verdicts = RepeatedCalls(SMALL), list[str]()
    for number, (argument, text) in enumerate(attempts):
        call = make_call(number, argument)
        refusal = repeated.find_refusal(call)
        result = make_result(call, refusal or ToolOutput(text=f"{text} after 0.{number} s"))
        shown = repeated.record(call, result)
        if refusal is not None:
            verdicts.append("end" if repeated.ending else "refuse")
            assert shown is result
        else:
            verdicts.append("run" if shown is result else "warn")
        if repeated.ending:
            break
    assert verdicts == describe_by_hand(attempts)


@given(st.lists(st.tuples(st.binary(max_size=1), st.binary(max_size=1)), max_size=30), st.binary(max_size=1))
def test_the_count_is_never_more_than_the_calls(history: list[tuple[bytes, bytes]], call: bytes) -> None:
    records = [CallRecord(*entry) for entry in history]
    made = [record for record in records if record.call == call]
    count = count_repeats(records, call)
    assert count <= len(made)
    assert len({record.result for record in made[len(made) - count :]}) <= 1
    assert count == len(made) or made[-1 - count].result != made[-1].result


def test_the_thresholds_are_reached_in_order() -> None:
    verdicts = [decide_repeat(count, SMALL) for count in range(1, 9)]
    assert verdicts == ["run", "run", "warn", "warn", "refuse", "refuse", "end", "end"]


async def test_a_run_that_repeats_a_call_is_told_refused_and_ended(tmp_path: Path) -> None:
    made: list[str] = []

    async def work(call: ToolRequest) -> ToolOutput:
        made.append(call.call_id)
        return ToolOutput(text=f"nothing new after {len(made) / 10} s")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("work")

    tools = [make_tool("work", work)]
    async with open_app_fixture(tmp_path, agent, tools=tools, loop_detection=SMALL) as app:
        view = await app.ask("go")
        assert (view.state, view.error_code) == ("error", "tool_loop")
        assert "This is call 7 of 'work' with the same arguments and the same result." in (view.error or "")
        assert len(made) == SMALL.critical_threshold - 1
        texts = [
            "".join(block["text"] for block in entry["content"])
            for entry in await app.transcript()
            if entry["role"] == "toolResult"
        ]
        assert [("[This is call" in text, "It was not made" in text) for text in texts] == [
            *[(False, False)] * 2,
            *[(True, False)] * 2,
            *[(False, True)] * 3,
        ]
        made.clear()
        assert (await app.ask("go again")).error_code == "tool_loop"
        assert len(made) == SMALL.critical_threshold - 1, "another run begins to count anew"


async def test_without_the_setting_calls_are_repeated_as_the_model_likes(tmp_path: Path) -> None:
    made: list[str] = []

    async def work(call: ToolRequest) -> ToolOutput:
        made.append(call.call_id)
        return ToolOutput(text="nothing new")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_answer("done") if len(made) == 40 else make_tool_calls("work")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)], max_steps=50) as app:
        assert (await app.ask("go")).state == "ok"


def test_a_picture_that_changes_is_another_result() -> None:
    """Such as a screenshot of a page that is being worked on, whose text says only that it is one."""
    repeated = RepeatedCalls(SMALL)
    for number in range(10):
        call = make_call(number, "a")
        assert repeated.find_refusal(call) is None
        result = make_result(call, ToolOutput(text="[An image.]"))
        image = ImageBlock(data=f"iVBORw0K{number:04}", mime_type="image/png")
        result = msgspec.structs.replace(result, content=[*result.content, image])
        assert repeated.record(call, result) is result


def test_an_interrupted_run_goes_on_counting() -> None:
    before, messages = RepeatedCalls(SMALL), list[Any]()
    for number in range(5):
        call = make_call(number, "a")
        result = make_result(call, before.find_refusal(call) or ToolOutput(text="x"))
        messages += [AssistantMessage(content=[call], timestamp=1), before.record(call, result)]
    after = RepeatedCalls(SMALL)
    after.load(messages)
    for number in (5, 6):
        call = make_call(number, "a")
        refusals = [repeated.find_refusal(call) for repeated in (before, after)]
        assert refusals[0] is not None
        assert refusals[0] == refusals[1]
        for repeated in (before, after):
            repeated.record(call, make_result(call, refusals[0]))
    assert before.ending == after.ending
    assert after.ending is not None


@pytest.mark.parametrize(
    ("settings", "is_valid"),
    [
        ({}, True),
        ({"enabled": True}, True),
        ({"enabled": True, "warningThreshold": 2, "criticalThreshold": 3}, True),
        ({"enabled": True, "warningThreshold": 20}, True),
        ({"enabled": True, "globalCircuitBreakerThreshold": 20}, True),
        ({"enabled": True, "warningThreshold": 20, "criticalThreshold": 20}, False),
        ({"enabled": True, "criticalThreshold": 5, "globalCircuitBreakerThreshold": 5}, False),
        ({"enabled": True, "globalCircuitBreakerThreshold": 3}, False),
        ({"enabled": True, "historySize": 30}, True),
        ({"enabled": False, "historySize": 29}, True),
        ({"enabled": True, "historySize": 1001}, False),
        ({"enabled": True, "warningThreshold": 1}, False),
    ],
)
def test_thresholds_that_are_out_of_order_are_refused(settings: dict[str, Any], is_valid: bool) -> None:
    for raw in (
        {"tools": {"loopDetection": settings}},
        {"agents": {"list": [{"id": "main", "tools": {"loopDetection": settings}}]}},
    ):
        if is_valid:
            config, warnings = parse(raw)
            assert (config.get_agent("main").loop_detection is not None) == bool(settings.get("enabled"))
            assert not [text for text in warnings if "loopDetection" in text]
        else:
            with pytest.raises(ConfigError, match="loopDetection"):
                parse(raw)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (10, 20, 30)),
        ({"warningThreshold": 20}, (20, 21, 30)),
        ({"warningThreshold": 40}, (40, 41, 42)),
        ({"criticalThreshold": 30}, (10, 30, 31)),
        ({"criticalThreshold": 5}, (4, 5, 30)),
        ({"globalCircuitBreakerThreshold": 4}, (2, 3, 4)),
    ],
)
def test_a_threshold_that_is_not_set_gives_way(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    config, _ = parse({"tools": {"loopDetection": {"enabled": True, **settings}}})
    limits = config.get_agent("main").loop_detection
    assert limits is not None
    counts = limits.warning_threshold, limits.critical_threshold, limits.global_circuit_breaker_threshold
    assert counts == expected


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"historySize": 10}, 30), ({"historySize": 29}, 30), ({"globalCircuitBreakerThreshold": 50}, 50)],
)
def test_the_history_has_room_for_the_circuit_breaker(settings: dict[str, Any], count: int) -> None:
    """A configuration of another gateway, where the history may be shorter, is loaded with a warning."""
    asked = {"enabled": True, **settings}
    for raw, path in (
        ({"tools": {"loopDetection": asked}}, "tools.loopDetection.historySize"),
        (
            {"agents": {"list": [{"id": "main", "tools": {"loopDetection": asked}}]}},
            "agents.list[0].tools.loopDetection.historySize",
        ),
    ):
        config, warnings = parse(raw)
        limits = config.get_agent("main").loop_detection
        assert limits is not None
        assert limits.history_size == limits.global_circuit_breaker_threshold == count
        told = [text for text in warnings if path in text]
        assert [f"so {count} count" in text for text in told] == [True] * ("historySize" in settings)
        call = CallRecord(b"call", b"result")
        assert decide_repeat(count_repeats([call] * limits.history_size, call.call), limits) == "end"


def test_detectors_of_other_gateways_are_a_warning() -> None:
    _, warnings = parse({"tools": {"loopDetection": {"enabled": True, "detectors": {"pingPong": False}}}})
    assert [text for text in warnings if "'tools.loopDetection.detectors' has no effect" in text]
