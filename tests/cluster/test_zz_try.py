import asyncio, time, json, os
import pytest
from pathlib import Path
from cluster.choir import choir
from cluster.load import Load, plan
from cluster.weather import Wind, Fault, forecast
from cluster import test_cluster
pytestmark = pytest.mark.anyio
SEED=int(os.environ.get("SEED","100"))
CALM=os.environ.get("CALM")
@pytest.mark.timeout(0)
async def test_one(tmp_path, postgres):
    async with choir(tmp_path, postgres, seed=SEED) as c:
        load, wind = Load(c, plan(SEED, 2000)), Wind(c)
        marks=[]
        orig=wind._happen
        async def h(f):
            marks.append((time.time(), f"BEGIN {f}")); await orig(f); marks.append((time.time(), f"END {f}"))
        wind._happen=h
        w=asyncio.create_task(load.run())
        if CALM: await asyncio.sleep(15)
        else: await wind.blow(forecast(SEED, 26))
        load.stop.set()
        await w
        await test_cluster._leave(c)
        rows=c.rows("select id, created_at, started_at, ended_at, session, origin from runs where state<>'queued' order by started_at")
        c.count(); print(test_cluster.report(load, wind, SEED, 0))
        ev=[(t*1000, m) for t,m in marks]
        for r in rows:
            if (r["started_at"] or 0)-r["created_at"]>800: ev.append((r["started_at"], f"    lane {r['session']} {r['origin']} waited {r['started_at']-r['created_at']} ms (since {r['created_at']%1000000})"))
            if r["started_at"] and r["ended_at"]-r["started_at"]>2500: ev.append((r["ended_at"], f"        run of lane {r['session']} {r['origin']} took {r['ended_at']-r['started_at']}"))
        for t,m in sorted(ev): print(round(t)%1000000, m)
        print(load.wrong())
