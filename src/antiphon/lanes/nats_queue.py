"""The JetStream side of lanes: a stream with one message per active lane, and one consumer for all replicas.

It writes to the server and interprets its answers; it does not decide who runs what. Messages are pulled in
advance, so that an activation reaches a replica without an extra round trip.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from antiphon.errors import BusError, ConfigError
from antiphon.nats.connection import NATS_RESPONSE_TIMEOUT_SECONDS, list_connection_errors, subscribe

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger(__name__)

CONSUMER_NAME = "replicas"
PULL_EXPIRY_SECONDS = 30.0
HEARTBEAT_SECONDS = 2.0  # for a pull request; a server that died has lost the request
MAX_SILENCE_SECONDS = 2.5 * HEARTBEAT_SECONDS
MAX_WAITING_REQUESTS = 4096  # pull requests, one per replica
STREAM_SETUP_TIMEOUT_SECONDS = 5.0  # a cluster has to agree on a change of a stream
ALREADY_ACTIVE_CODE, OTHER_CONFIGURATION_CODE = 10077, 10058
HEARTBEAT_STATUS, EXPIRED_STATUS, NO_RESPONDERS_STATUS = "100", "408", "503"
IN_PROGRESS_ACK, NEGATIVE_ACK = b"+WPI", b"-NAK"
NAMESPACE_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")

OnLaneTaken = Callable[[int, str], Awaitable[None]]
OnLane = Callable[[int], None]


class LaneQueue:
    """The lane stream. `on_taken` gets a lane and its reply subject; `on_missed` a lane activated without a stream."""

    def __init__(
        self,
        namespace: str,
        ack_wait: float,
        replicas: int,
        *,
        on_taken: OnLaneTaken,
        on_missed: OnLane,
        on_abandoned: Callable[[int], Awaitable[None]],
    ) -> None:
        if not NAMESPACE_PATTERN.fullmatch(namespace):
            raise ConfigError(
                f"{namespace!r} is not a valid bus namespace.",
                "Use letters, digits, hyphens and underscores.",
                path="bus.namespace",
            )
        self.stream = f"{namespace}-lanes"
        self._lane_subject = f"{namespace}.lane."
        self._abandon_subject = f"{namespace}.abandon"
        self._pull_subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{CONSUMER_NAME}"
        self._ack_wait = ack_wait
        self._replicas = replicas
        self._on_taken = on_taken
        self._on_missed = on_missed
        self._on_abandoned = on_abandoned
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._pull_number = 0
        self._lanes_to_come = 0
        self._pull_ended = asyncio.Event()
        self._stream_fault = ""
        self._last_message_at = 0.0
        self._missed_lanes: dict[int, None] = {}
        self._logged_code = 0

    # --- the connection ---

    async def join(self, client: Client) -> None:
        await self._ensure_stream(client)
        self._inbox = client.new_inbox()
        self._subscription = await subscribe(client, f"{self._inbox}.*", self._receive)
        await subscribe(client, self._abandon_subject, self._receive_abandon)

    def leave(self) -> None:
        self._subscription = None
        self._pull_ended.set()

    async def close(self) -> None:
        """Takes no more lanes; messages that have already arrived are still handled."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(*list_connection_errors()):
                await subscription.drain()

    async def _ensure_stream(self, client: Client) -> None:
        """Creates or corrects the stream and its consumer."""
        from nats.js.errors import APIError, ServiceUnavailableError  # noqa: PLC0415 - an extra

        problem = "The NATS servers could not store the queue of lanes"
        try:
            await self._create_stream(client)
        except ServiceUnavailableError as error:
            raise BusError(
                f"{problem}: JetStream does not answer.", "Enable it: `nats-server -js -sd <directory>`."
            ) from error
        except APIError as error:
            raise BusError(
                f"{problem}: {error.description}.", f"Check stream {self.stream} and the servers' limits."
            ) from error
        except list_connection_errors() as error:
            raise BusError(
                f"{problem}: JetStream does not answer.", "Check that a majority of the servers runs."
            ) from error

    async def _create_stream(self, client: Client) -> None:
        from nats.js import api  # noqa: PLC0415 - an extra
        from nats.js.errors import BadRequestError  # noqa: PLC0415

        stream = api.StreamConfig(
            name=self.stream,
            subjects=[f"{self._lane_subject}*"],
            retention=api.RetentionPolicy.WORK_QUEUE,
            max_msgs_per_subject=1,
            discard=api.DiscardPolicy.NEW,
            discard_new_per_subject=True,
            storage=api.StorageType.FILE,
            num_replicas=self._replicas,
        )
        consumer = api.ConsumerConfig(
            durable_name=CONSUMER_NAME,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait,
            max_ack_pending=-1,
            max_waiting=MAX_WAITING_REQUESTS,
        )
        manager: Any = client.jsm(timeout=STREAM_SETUP_TIMEOUT_SECONDS)  # pyright: ignore[reportUnknownMemberType]
        try:
            await manager.add_stream(stream)
        except BadRequestError as error:
            if error.err_code != OTHER_CONFIGURATION_CODE:
                raise
            await manager.update_stream(stream)
        await manager.add_consumer(self.stream, consumer)

    # --- pulling lanes ---

    async def pull_lanes(self, client: Client, lanes: int) -> None:
        """Pulls up to `lanes` lanes, until they arrived or the request expired. Restores the stream if needed."""
        self._pull_number += 1
        self._lanes_to_come, self._stream_fault = lanes, ""
        self._pull_ended.clear()
        self._last_message_at = asyncio.get_running_loop().time()
        request = {
            "batch": lanes,
            "expires": round(PULL_EXPIRY_SECONDS * 1e9),
            "idle_heartbeat": round(HEARTBEAT_SECONDS * 1e9),
        }
        await client.publish(
            self._pull_subject, json.dumps(request).encode(), reply=f"{self._inbox}.p{self._pull_number}"
        )
        await self._wait_until_pull_ended()
        if self._stream_fault and client.is_connected:
            log.warning("The queue of lanes at NATS failed: %s; restoring it", self._stream_fault)
            await self._ensure_stream(client)
            missed, self._missed_lanes = self._missed_lanes, {}
            for lane in missed:
                self._on_missed(lane)

    async def _wait_until_pull_ended(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._pull_ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._last_message_at + MAX_SILENCE_SECONDS):
                    await self._pull_ended.wait()
                    return
            if loop.time() >= self._last_message_at + MAX_SILENCE_SECONDS:
                self._stream_fault = "no heartbeat"
                return

    # --- writing ---

    async def add_lane(self, client: Client, lane: int) -> None:
        await client.publish(f"{self._lane_subject}{lane}", b"", reply=f"{self._inbox}.a{lane}")

    async def renew_lease(self, client: Client, reply: str) -> None:
        await client.publish(reply, IN_PROGRESS_ACK)

    async def give_back(self, client: Client, reply: str) -> None:
        """Returns a lane to the queue, so that any replica with a free slot gets it at once."""
        await client.publish(reply, NEGATIVE_ACK)

    async def acknowledge(self, client: Client, reply: str) -> None:
        """Acknowledges a lane. Returns when the server has done so: from then on it can be activated again."""
        await client.request(reply, b"", timeout=NATS_RESPONSE_TIMEOUT_SECONDS)

    async def abandon(self, client: Client, lane: int) -> None:
        await client.publish(self._abandon_subject, str(lane).encode())

    # --- incoming messages ---

    async def _receive(self, message: Msg) -> None:
        if message.subject.startswith(self._lane_subject):
            self._last_message_at = asyncio.get_running_loop().time()
            self._lanes_to_come -= 1
            if self._lanes_to_come <= 0:
                self._pull_ended.set()
            await self._on_taken(int(message.subject[len(self._lane_subject) :]), message.reply)
            return
        what = message.subject[len(self._inbox) + 1 :]
        status = (message.headers or {}).get("Status", "")
        if what.startswith("p"):
            if int(what[1:]) == self._pull_number:
                self._on_status(status, (message.headers or {}).get("Description", ""))
        else:
            self._on_answer(int(what[1:]), status, message.data)

    def _on_status(self, status: str, why: str) -> None:
        self._last_message_at = asyncio.get_running_loop().time()
        if status == HEARTBEAT_STATUS:
            return
        if status != EXPIRED_STATUS:
            self._stream_fault = (
                "the stream is missing" if status == NO_RESPONDERS_STATUS else why.strip().lower() or status
            )
        self._pull_ended.set()

    def _on_answer(self, lane: int, status: str, data: bytes) -> None:
        """Handles the answer to an activation. Most confirm it, or report that the lane was already active."""
        if status == NO_RESPONDERS_STATUS:
            self._missed_lanes[lane] = None
            self._stream_fault = "the stream is missing"
            self._pull_ended.set()
            return
        if b'"error"' not in data:
            return
        error: dict[str, Any] = json.loads(data)["error"]
        code = error.get("err_code", 0)
        if code not in (ALREADY_ACTIVE_CODE, self._logged_code):
            self._logged_code = code  # logged once, not for each of a thousand lanes
            log.error(
                "NATS rejects activations: %s; the supervisor's sweep will retry", error.get("description")
            )

    async def _receive_abandon(self, message: Msg) -> None:
        with suppress(ValueError):
            await self._on_abandoned(int(message.data))
