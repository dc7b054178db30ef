import asyncio, time, json, os, signal
import pytest
from cluster.choir import choir
from cluster.test_takeover import begin, taken_from, _others, BOUND
pytestmark = pytest.mark.anyio
async def test_one(tmp_path, postgres):
    async with choir(tmp_path, postgres) as singing:
        owner = await begin(singing, 2.0)
        owner.pause()
        await taken_from(singing, owner, BOUND)
        await _others(singing, owner)[0].ask("wait", run="run", seconds=BOUND)
        owner.resume()
        await asyncio.sleep(5)
        owner.signal(signal.SIGUSR1)
        await asyncio.sleep(1)
        print(await owner.ask("replicas"))
        print(owner.said())
        print(singing.rows("select id, owner, state, epoch, attempts from runs"))
