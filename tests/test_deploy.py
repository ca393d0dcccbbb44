"""The files of deploy/ say what is so: their commands, settings and variables exist, and they agree with each other."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.cli.up import SENSOR_ON
from pgcdc_assets.core.ending import END_SECONDS
from pgcdc_assets.project import INSTANCE_YAML, LOCATION
from pgcdc_assets.settings import Settings, unknown_variables

DEPLOY = Path(__file__).parent.parent / "deploy"
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
UNIT = (DEPLOY / "systemd/pgcdc@.service").read_text()
MANIFESTS = {
    f"{found['kind']}/{found['metadata']['name']}": found
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name not in ("kustomization.yaml", "instance.yaml", "workspace.yaml")
    for found in yaml.safe_load_all(path.read_text())
}
INSTANCES = {name: yaml.safe_load((DEPLOY / name).read_text()) for name in
             ("compose/dagster.yaml", "kubernetes/instance.yaml")}  # fmt: skip
VARIABLES = "PGCDC_SOURCE PGCDC_LAKE PGCDC_SPARK PGCDC_ASSETS_SENSOR"
IMAGE = f"pgcdc_assets:{PROJECT['version']}"


def ours() -> dict[str, dict[str, Any]]:
    """compose's services of our image."""
    return {name: one for name, one in COMPOSE["services"].items() if "pgcdc_assets" in one["image"]}


def pods() -> dict[str, dict[str, Any]]:
    return {name: one["spec"]["template"]["spec"] for name, one in MANIFESTS.items() if one["kind"] == "Deployment"}


def commands() -> Iterator[list[str]]:
    for service in ours().values():
        yield service["command"]
        yield service.get("healthcheck", {}).get("test", ["CMD"])[1:]
    for pod in pods().values():
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            yield container["args"]
            for probe in ("readinessProbe", "livenessProbe"):
                yield container.get(probe, {}).get("exec", {}).get("command", [])
    yield shlex.split(re.findall(r"^ExecStart=/opt/pgcdc/bin/(.+)$", UNIT, re.MULTILINE)[0])


def settings_env() -> dict[str, str]:
    lines = (DEPLOY / "kubernetes/settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("command", [one for one in commands() if one[:1] == ["pgcdc"]], ids=" ".join)
def test_a_command_of_ours_is_one(command: list[str]) -> None:
    context = click.Context(pgcdc)
    name, found, rest = pgcdc.resolve_command(context, list(command[1:]))
    assert found is not None, name
    found.make_context(name, rest, parent=context)


def test_all_other_commands_are_of_what_the_image_has() -> None:
    named = {one[0] for one in commands() if one}
    assert named == {"pgcdc", "dagster", "dagster-daemon", "dagster-webserver", "spark-class", "python"}


@pytest.mark.parametrize("environment", [ours()["code"]["environment"], settings_env()], ids=["compose", "kubernetes"])
def test_settings_exist_and_hold_what_they_may(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_variables(environment) == []
    assert sorted(name for name in environment if name.startswith("PGCDC_")) == sorted(VARIABLES.split())
    for name, value in environment.items():
        if name.startswith("PGCDC_"):
            monkeypatch.setenv(name, re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value))
    settings = Settings.load()
    assert settings.layout.root.scheme == "s3"
    assert settings.spark["spark.driver.memory"]
    assert environment[SENSOR_ON] == "on"


@pytest.mark.parametrize("name", INSTANCES)
def test_dagster_s_instance_is_ours_with_another_storage(name: str) -> None:
    found = dict(INSTANCES[name])
    storage = found.pop("storage")["postgres"]["postgres_db"]
    assert found.pop("compute_logs")["class"] == "NoOpComputeLogManager"
    assert (found.pop("run_launcher", None) is not None) == name.startswith("kubernetes")
    assert found == yaml.safe_load(INSTANCE_YAML)
    named = {value["env"] for value in storage.values() if isinstance(value, dict)}
    for service in ("setup", "code", "webserver", "daemon"):
        assert named <= set(COMPOSE["services"][service]["environment"])
    assert named - set(settings_env()) == {"DAGSTER_POSTGRES_PASSWORD"}


def test_the_code_location_is_found_under_its_name() -> None:
    for place in ("compose", "kubernetes"):
        (found,) = yaml.safe_load((DEPLOY / place / "workspace.yaml").read_text())["load_from"]
        assert found["grpc_server"] == {"host": "code", "port": 4000, "location_name": LOCATION}
    assert "code" in COMPOSE["services"]
    assert MANIFESTS["Service/code"]["spec"]["ports"][0]["port"] == 4000


def test_whoever_works_gets_more_time_to_end_than_it_needs() -> None:
    assert float(COMPOSE["services"]["code"]["stop_grace_period"].removesuffix("s")) > END_SECONDS
    assert pods()["Deployment/code"]["terminationGracePeriodSeconds"] > END_SECONDS
    launched = INSTANCES["kubernetes/instance.yaml"]["run_launcher"]["config"]["run_k8s_config"]
    assert launched["pod_spec_config"]["termination_grace_period_seconds"] > END_SECONDS
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > END_SECONDS
    assert "\nKillMode=mixed\n" in UNIT, "a signal for all of the group would end Java first"
    assert '\nENTRYPOINT ["tini", "--"]\n' in (DEPLOY / "Dockerfile").read_text(), "not -g, for the same reason"


def test_secrets_reach_only_who_needs_them_and_stand_nowhere() -> None:
    secret = {"PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    has = {name for name, one in ours().items() if secret & set(one.get("environment", {}))}
    assert has == {"setup", "code", "spark-worker"}
    for one in COMPOSE["services"].values():
        for name, value in one.get("environment", {}).items():
            if re.search("PASSWORD|KEY|CREDENTIAL|IDENTITY", name):
                assert re.fullmatch(r"\$\{\w+:\?see env.example\}", value), name
    offered = re.findall(r"^(\w+)=(.*)$", (DEPLOY / "compose/env.example").read_text(), re.MULTILINE)
    asked = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose/compose.yaml").read_text()))
    assert {name for name, _ in offered} == asked
    assert not [value for _, value in offered if value]
    for name in ("Deployment/webserver", "Deployment/daemon"):
        assert "secretRef" not in json.dumps(pods()[name])


def test_pods_are_held_to_what_the_namespace_enforces() -> None:
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            found = container["securityContext"]
            assert (found["allowPrivilegeEscalation"], found["capabilities"]) == (False, {"drop": ["ALL"]})
            mounted = {one["mountPath"] for one in container["volumeMounts"]}
            assert {"/scratch", "/tmp"} <= mounted, "its root is read only"


def test_the_image_is_one_of_this_version_and_its_dependencies() -> None:
    assert {one["image"] for one in ours().values()} == {f"${{PGCDC_IMAGE:-{IMAGE}}}"}
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    (image,) = kustomization["images"]
    launched = INSTANCES["kubernetes/instance.yaml"]["run_launcher"]["config"]["job_image"]
    assert launched == f"{image['newName']}:{image['newTag']}"
    assert str(image["newTag"]) == PROJECT["version"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert IMAGE in dockerfile
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for path in line.split():
            assert (DEPLOY.parent / path).exists(), path
            assert f"!{path}" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()


def test_what_the_image_has_is_what_the_tests_have() -> None:
    """The lock of the image differs from that of the checkout by whole packages alone."""
    pinned = [dict(re.findall(r"^([a-z][\w.-]*)(?:\[\w+\])?==(\S+)", path.read_text(), re.MULTILINE))
              for path in (DEPLOY.parent / "requirements.lock", DEPLOY / "requirements.lock")]  # fmt: skip
    here, image = pinned
    assert {name for name in here.keys() & image.keys() if here[name] != image[name]} == set()
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["deploy"]):
        name = re.split(r"[\[=<>]", line)[0]
        assert name in image
