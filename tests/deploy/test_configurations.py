"""The configurations of `deploy/`: the product's own loader takes them, and real servers are reached with them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from antiphon.config import LoadedConfig, load
from antiphon.gateway.server import serve_gateway
from cluster.database import PASSWORD, Postgres
from cluster.servers import NatsServer, binary
from deploy.manifests import DEPLOY, KUBERNETES, compose, resources

FILES = [DEPLOY / "antiphon.json5", KUBERNETES / "antiphon.json5"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
@pytest.mark.requirement("C", "B1")
def test_the_loader_accepts_it_without_warnings(path: Path, tmp_path: Path) -> None:
    loaded = _load_copy(path, tmp_path)
    assert not loaded.warnings
    config = loaded.config
    assert config.store.url is not None and config.bus.url is not None
    for secret in (config.store.password, config.bus.password, config.gateway.auth.token):
        assert secret is not None and secret.kind == "exec"  # none of them stands in the file
    assert (config.gateway.bind, config.gateway.port, config.gateway.auth.mode) == ("lan", 18789, "token")
    sandbox = config.get_agent("main").sandbox
    assert (sandbox.backend, sandbox.fallback) == (None, "landlock")  # containers allow no namespaces
    assert config.bus.lanes >= config.agents.defaults.max_concurrent


def test_the_configurations_name_what_is_deployed(tmp_path: Path) -> None:
    text = FILES[0].read_text("utf-8")
    gateway = compose()["services"]["gateway"]
    for name in gateway["secrets"]:
        assert f'"/run/secrets/{name}"' in text
    for name in ("STORE_URL", "BUS_URL"):
        assert f'{{ env: "{name}" }}' in text
        assert urlsplit(str(gateway["environment"][name])).hostname in compose()["services"]
    nats = resources()["StatefulSet", "nats"]["spec"]
    [container] = resources()["Deployment", "gateway"]["spec"]["template"]["spec"]["containers"]
    [where] = [given["value"] for given in container["env"] if given["name"] == "BUS_URL"]
    wanted = [f"nats://nats-{n}.{nats['serviceName']}:4222" for n in range(nats["replicas"])]
    assert where.split(",") == wanted
    assert _load_copy(FILES[1], tmp_path).config.bus.replicas == nats["replicas"]


@pytest.mark.parametrize(
    ("conf", "secrets"), [(DEPLOY / "nats.conf", "secrets"), (KUBERNETES / "nats.conf", "secrets/antiphon")]
)
def test_nats_takes_its_configuration(tmp_path: Path, conf: Path, secrets: str) -> None:
    _make_secrets(tmp_path / "run" / secrets)
    (tmp_path / "etc/nats").mkdir(parents=True)
    file = tmp_path / "etc/nats/nats.conf"
    file.write_text(conf.read_text("utf-8"))
    done = subprocess.run(
        [binary(), "-t", "-c", file], check=False, capture_output=True, text=True, timeout=30,
        env={"POD_NAME": "nats-0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_nats_routes_need_a_password_of_their_own(tmp_path: Path) -> None:
    _make_secrets(tmp_path / "secrets")
    routes = (tmp_path / "secrets/nats-routes.conf").read_text()
    password = (tmp_path / "secrets/nats-route-password").read_text()
    assert f'authorization {{ user: route, password: "{password}" }}' in routes
    assert (
        routes.count(f"nats://route:{password}@nats-")
        == resources()["StatefulSet", "nats"]["spec"]["replicas"]
    )
    cluster = (KUBERNETES / "nats.conf").read_text().partition("cluster {")[2].partition("}")[0]
    assert "nats-routes.conf" in cluster
    assert "routes:" not in cluster


def _make_secrets(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([DEPLOY / "secrets.sh", place], check=True, capture_output=True, timeout=30)


def _at_home(tmp_path: Path) -> LoadedConfig:
    """The configuration of compose, with its secrets where they are here."""
    text = FILES[0].read_text("utf-8")
    for there, here in {"/run/secrets": str(tmp_path / "secrets"), 'bind: "lan"': 'bind: "loopback"'}.items():
        assert there in text
        text = text.replace(there, here)
    return _load_private(text, tmp_path)


def _load_copy(path: Path, tmp_path: Path) -> LoadedConfig:
    """The mode of a file in a checkout depends on the umask, and the loader refuses files that a group can write."""
    return _load_private(path.read_text("utf-8"), tmp_path)


def _load_private(text: str, tmp_path: Path) -> LoadedConfig:
    file = tmp_path / "antiphon.json5"
    file.write_text(text)
    file.chmod(0o600)
    return load(file, required=True)


@pytest.mark.anyio
async def test_a_gateway_starts_with_it_on_real_servers(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_secrets(tmp_path / "secrets")
    (tmp_path / "secrets" / "postgres-password").write_text(PASSWORD)
    login: dict[str, Any] = {
        "user": "antiphon", "password": (tmp_path / "secrets" / "nats-password").read_text()
    }  # fmt: skip
    (tmp_path / "nats").mkdir()
    nats = NatsServer(tmp_path / "nats", authorization=login)
    nats.start()
    try:
        monkeypatch.setenv("STORE_URL", (await postgres.database(tmp_path)).url)
        monkeypatch.setenv("BUS_URL", nats.url)
        config = _at_home(tmp_path).config
        async with serve_gateway(config, tmp_path / "state", port=0) as served:
            url = served.url.replace("ws", "http", 1)
            token = (tmp_path / "secrets" / "gateway-token").read_text()
            async with httpx2.AsyncClient(base_url=url) as client:
                assert (await client.get("/readyz")).json() == {"ready": True}
                assert (await client.get("/metrics")).status_code == 401
                told = await client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
                assert "antiphon_bus_connected 1.0" in told.text
                assert "antiphon_replicas 1.0" in told.text
    finally:
        nats.kill()
