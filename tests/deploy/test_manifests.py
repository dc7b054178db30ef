"""What is deployed fits its schemas, fits together and keeps to what the gateway does. None of it is run here."""

from __future__ import annotations

import configparser
import json
import os
import re
import stat
import subprocess
import sys
from importlib import resources as files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from antiphon.engine.outbox import sender
from antiphon.engine.supervisor import EngineTimings
from antiphon.gateway import health, server
from antiphon.lanes import nats as lanes
from antiphon.lanes.local import CANCEL_WAIT_SECONDS
from deploy.manifests import DEPLOY, KUBERNETES, compose, documents, one, resources

GATEWAY = ("Deployment", "gateway")
NATS = ("StatefulSet", "nats")
PORT = 18789
USER = 10001


def leaving(drain: float = 5.0) -> float:
    """Seconds that a gateway may take from SIGTERM to its end, by its own bounds."""
    return (
        server.SHUTDOWN_GRACE_SECONDS
        + drain
        + sender.SHUTDOWN_GRACE_SECONDS
        + CANCEL_WAIT_SECONDS
        + 2 * lanes.NATS_RESPONSE_TIMEOUT_SECONDS
    )


def seconds(text: str) -> float:
    return float(text.removesuffix("s")) if text.endswith("s") else float(text.removesuffix("m")) * 60


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_can_be_read_and_names_no_host_to_pull_from(path: Path) -> None:
    assert all(document is not None for document in documents(path))
    images = re.findall(r"^\s*image: (\S+)", path.read_text("utf-8"), re.MULTILINE)
    assert [image for image in images if "/" in image] == []


# --- the image ---


def test_the_image_is_built_as_a_linter_wants_it() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, "--no-color", DEPLOY / "Dockerfile"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_unprivileged_and_receives_signals() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    last = text[text.rindex("FROM ") :]
    assert f"USER {USER}:{USER}" in last
    assert 'ENTRYPOINT ["antiphon"]' in last
    assert "STOPSIGNAL SIGTERM" in last
    assert f"127.0.0.1:{PORT}/healthz" in last
    assert "ANTIPHON_STATE_DIR=/var/lib/antiphon/" in last
    copied = re.findall(r"^COPY ((?:[\w.]+ )+)", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists(), name
        assert f"!{name}" in (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()


# --- compose ---


def test_compose_fits_the_specification() -> None:
    place = files.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: Any = json.loads(place.read_text("utf-8"))
    jsonschema.Draft7Validator(schema).validate(compose())  # pyright: ignore[reportUnknownMemberType]


def test_everything_that_compose_refers_to_is_there(tmp_path: Path) -> None:
    made = _secrets(tmp_path)
    given = compose()
    for config in given["configs"].values():
        assert (DEPLOY / config["file"]).is_file(), config
    for secret in given["secrets"].values():
        assert Path(secret["file"]).name in made, secret
    for name, service in given["services"].items():
        for secret in service.get("secrets", ()):
            assert secret in given["secrets"], name
        for config in service.get("configs", ()):
            assert config["source"] in given["configs"], name
        for network in service["networks"]:
            assert network in given["networks"], name
        for volume in service.get("volumes", ()):
            source, _, target = volume.partition(":")
            assert not target or source in given["volumes"], name
        assert service["restart"] == "unless-stopped", name
        assert name == "gateway" or "healthcheck" in service, name  # that of the gateway is in its image
    assert (DEPLOY / given["services"]["gateway"]["build"]["dockerfile"]).parent.name == "deploy"


def test_only_this_machine_reaches_what_compose_starts() -> None:
    given = compose()
    published = {name: service.get("ports", []) for name, service in given["services"].items()}
    assert [port for port in published.pop("proxy") if not port.startswith("127.0.0.1:")] == []
    assert not any(published.values())
    assert given["networks"]["back"]["internal"] is True
    assert given["services"]["postgres"]["networks"] == given["services"]["nats"]["networks"] == ["back"]


def test_compose_runs_several_replicas_and_lets_them_leave() -> None:
    gateway = compose()["services"]["gateway"]
    assert gateway["deploy"]["replicas"] >= 2
    assert seconds(gateway["stop_grace_period"]) > leaving()
    assert (
        "command" not in gateway and "entrypoint" not in gateway
    )  # of the image: no shell before the process


def test_the_proxy_asks_for_readiness_and_finds_the_replicas() -> None:
    text = (DEPLOY / "haproxy.cfg").read_text("utf-8")
    assert "http-check send meth GET uri /readyz" in text
    assert re.search(rf"server-template \w+ \d+ gateway:{PORT}$", text, re.MULTILINE)
    [check] = re.findall(r"timeout check (\d+)s", text)
    assert int(check) > health.STORE_PROBE_TIMEOUT_SECONDS
    [port] = re.findall(r"bind :(\d+)", text)
    assert compose()["services"]["proxy"]["ports"][0].endswith(f":{port}")


def _secrets(place: Path) -> set[str]:
    subprocess.run([DEPLOY / "secrets.sh", place / "secrets"], check=True, capture_output=True, timeout=30)
    return {path.name for path in (place / "secrets").iterdir()}


def test_the_guide_adds_the_secret_that_nats_mounts_and_restarts_all_its_servers(tmp_path: Path) -> None:
    guide = (DEPLOY.parent / "docs/operations/upgrade.md").read_text("utf-8")
    [commands] = [
        block for block in guide.split("```") if block.startswith("sh\n") and "nats-routes" in block
    ]
    nats = resources()["StatefulSet", "nats"]
    [secret] = [it["secret"] for it in nats["spec"]["template"]["spec"]["volumes"] if "secret" in it]
    assert "nats-routes.conf" in {item["key"] for item in secret["items"]}
    assert f"patch secret {secret['secretName']} " in commands
    assert f"scale statefulset {nats['metadata']['name']} --replicas=0" in commands
    [label] = nats["spec"]["selector"]["matchLabels"].items()
    assert f"-l {'='.join(label)} " in commands
    assert "nats-routes.conf" in _secrets(tmp_path)
    assert "docs/operations/upgrade.md" in (KUBERNETES / "nats.yaml").read_text("utf-8")


def test_secrets_are_created_once_in_a_private_directory(tmp_path: Path) -> None:
    names = _secrets(tmp_path)
    place = tmp_path / "secrets"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    before = {name: (place / name).read_text() for name in names}
    assert len({*before.values()}) == len(names)
    assert len(before["gateway-token"]) == 64
    assert before["nats-password"] in before["nats-auth.conf"]
    assert _secrets(tmp_path) == names
    assert before == {name: (place / name).read_text() for name in names}
    assert "deploy/secrets/" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


# --- Kubernetes ---


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_every_manifest_fits_the_schema_of_kubernetes(version: str) -> None:
    for item in [*resources().values(), one(KUBERNETES / "secret.example.yaml")]:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_kustomization_names_what_is_there_and_what_is_used() -> None:
    given = one(KUBERNETES / "kustomization.yaml")
    made = {generator["name"]: generator["files"] for generator in given["configMapGenerator"]}
    assert all((KUBERNETES / name).is_file() for names in made.values() for name in names)
    left = {path.name for path in KUBERNETES.glob("*.yaml")} - {*given["resources"], "kustomization.yaml"}
    assert left == {"secret.example.yaml"}
    secret = one(KUBERNETES / "secret.example.yaml")
    mounted = [volume for kind in (GATEWAY, NATS) for volume in _pod(kind)["volumes"]]
    assert {v["configMap"]["name"] for v in mounted if "configMap" in v} == {*made}
    for volume in (volume["secret"] for volume in mounted if "secret" in volume):
        assert volume["secretName"] == secret["metadata"]["name"]
        assert {item["key"] for item in volume["items"]} <= {*secret["stringData"]}


def _pod(kind: tuple[str, str]) -> Any:
    return resources()[kind]["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", [GATEWAY, NATS])
def test_a_pod_has_minimal_privileges(kind: tuple[str, str]) -> None:
    pod = _pod(kind)
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    claims = resources()[kind]["spec"].get("volumeClaimTemplates", [])
    assert mounts == {v["name"] for v in pod["volumes"]} | {c["metadata"]["name"] for c in claims}
    assert {"requests", "limits"} == {*container["resources"]}


def test_the_gateway_has_the_right_probes_and_grace_period() -> None:
    pod = _pod(GATEWAY)
    [container] = pod["containers"]
    assert resources()[GATEWAY]["spec"]["replicas"] == 3
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["readinessProbe"]["timeoutSeconds"] > health.STORE_PROBE_TIMEOUT_SECONDS
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert pod["securityContext"]["runAsUser"] == USER
    [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > float(pause) + leaving()
    liveness = container["livenessProbe"]
    # A stall that loses the leases is no reason yet to kill the process.
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > EngineTimings().lease_seconds


def test_what_selects_pods_finds_them() -> None:
    labels = [resources()[kind]["spec"]["template"]["metadata"]["labels"] for kind in (GATEWAY, NATS)]
    found = resources()
    for (kind, name), item in found.items():
        spec = item.get("spec", {})
        selector: Any = spec.get("podSelector", spec.get("selector")) or dict[str, Any]()
        wanted: Any = selector.get("matchLabels", selector)
        assert any(wanted.items() <= given.items() for given in labels), (kind, name)
    assert found["Service", "gateway"]["spec"]["ports"] == [
        {"name": "http", "port": PORT, "targetPort": "http"}
    ]
    for name in ("gateway", "nats"):
        assert found["PodDisruptionBudget", name]["spec"]["maxUnavailable"] == 1
        assert ("NetworkPolicy", name) in found
    assert found[NATS]["spec"]["serviceName"] == "nats"


# --- systemd ---


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(DEPLOY / "antiphon.service", "utf-8")
    return parser


def test_the_unit_keeps_the_process_to_its_directory_and_lets_it_leave() -> None:
    given = unit()
    assert given.sections() == ["Unit", "Service", "Install"]
    service = dict(given["Service"])
    for name, value in {
        "DynamicUser": "yes", "StateDirectory": "antiphon", "StateDirectoryMode": "0700", "ProtectSystem": "strict",
        "ProtectHome": "yes", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "Restart": "on-failure",
        "KillSignal": "SIGTERM", "UMask": "0077",
    }.items():  # fmt: skip
        assert service[name] == value, name
    assert float(service["TimeoutStopSec"]) > leaving()
    assert service["ExecStart"].split()[1:] == ["up", "--debug"]
    assert "Environment=ANTIPHON_STATE_DIR=%S/antiphon" in (DEPLOY / "antiphon.service").read_text("utf-8")


@pytest.mark.parametrize("name", ["secrets.sh"])
def test_scripts_can_be_started(name: str) -> None:
    assert os.access(DEPLOY / name, os.X_OK)
