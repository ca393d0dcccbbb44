"""The files in deploy/ are consistent: their commands, settings and variables exist, and the files agree with each
other."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.core.ending import END_SECONDS
from pgcdc_assets.project import INSTANCE_YAML, LOCATION, SENSOR_ON
from pgcdc_assets.settings import Settings, unknown_variables
from pgcdc_assets.source.setup.setup import setup
from tests.fix_postgres import Database

DEPLOY = Path(__file__).parent.parent / "deploy"
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
UNIT = (DEPLOY / "systemd/pgcdc@.service").read_text()
METRICS_UNIT = (DEPLOY / "systemd/pgcdc-metrics@.service").read_text()
MANIFESTS = {
    f"{found['kind']}/{found['metadata']['name']}": found
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name not in ("kustomization.yaml", "instance.yaml", "workspace.yaml")
    for found in yaml.safe_load_all(path.read_text())
}
INSTANCES = {name: yaml.safe_load((DEPLOY / name).read_text()) for name in
             ("compose/dagster.yaml", "kubernetes/instance.yaml")}  # fmt: skip
LAUNCHER = INSTANCES["kubernetes/instance.yaml"]["run_launcher"]["config"]
POLICIES = [one["spec"] for one in MANIFESTS.values() if one["kind"] == "NetworkPolicy"]
VARIABLES = "PGCDC_SOURCE PGCDC_LAKE PGCDC_SPARK PGCDC_ASSETS_SENSOR"
IMAGE = f"pgcdc_assets:{PROJECT['version']}"


def ours() -> dict[str, dict[str, Any]]:
    """The services of the compose file that use our image."""
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
    for unit in (UNIT, METRICS_UNIT):
        (command,) = re.findall(r"^ExecStart=/opt/pgcdc/bin/(.+)$", unit, re.MULTILINE)
        values = dict(re.findall(r"^Environment=(\w+)=(\S+)$", unit, re.MULTILINE))
        yield shlex.split(Template(command).substitute(values))


def settings_env() -> dict[str, str]:
    lines = (DEPLOY / "kubernetes/settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("command", [one for one in commands() if one[:1] == ["pgcdc"]], ids=" ".join)
def test_each_pgcdc_command_of_the_deployment_exists(command: list[str]) -> None:
    context = click.Context(pgcdc, **pgcdc.context_settings)
    name, found, rest = pgcdc.resolve_command(context, list(command[1:]))
    assert found is not None, name
    found.make_context(name, rest, parent=context)


def test_commands_of_the_deployment_run_only_known_programs_and_modules() -> None:
    named = {one[0] for one in commands() if one}
    assert named == {"pgcdc", "dagster", "dagster-daemon", "spark-class", "python"}
    modules = {one[2] for one in commands() if one[:2] == ["python", "-m"]}
    assert modules == {"pgcdc_assets.cli.dagsterui"}
    assert all(find_spec(module) for module in modules)


@pytest.mark.parametrize("environment", [ours()["code"]["environment"], settings_env()], ids=["compose", "kubernetes"])
def test_settings_of_the_deployment_exist_and_are_valid(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_dagster_yaml_of_a_deployment_differs_from_the_default_only_in_storage_logs_launcher(name: str) -> None:
    found = dict(INSTANCES[name])
    storage = found.pop("storage")["postgres"]["postgres_db"]
    assert found.pop("compute_logs")["class"] == "NoOpComputeLogManager"
    assert (found.pop("run_launcher", None) is not None) == name.startswith("kubernetes")
    assert found == yaml.safe_load(INSTANCE_YAML)
    named = {value["env"] for value in storage.values() if isinstance(value, dict)}
    for service in ("setup", "code", "webserver", "daemon"):
        assert named <= set(COMPOSE["services"][service]["environment"])
    assert named - set(settings_env()) == {"DAGSTER_POSTGRES_PASSWORD"}


def test_workspace_files_name_the_code_location_and_its_grpc_server() -> None:
    for place in ("compose", "kubernetes"):
        (found,) = yaml.safe_load((DEPLOY / place / "workspace.yaml").read_text())["load_from"]
        assert found["grpc_server"] == {"host": "code", "port": 4000, "location_name": LOCATION}
    assert "code" in COMPOSE["services"]
    assert MANIFESTS["Service/code"]["spec"]["ports"][0]["port"] == 4000


def test_grace_periods_exceed_the_time_that_a_run_needs_to_end() -> None:
    assert float(COMPOSE["services"]["code"]["stop_grace_period"].removesuffix("s")) > END_SECONDS
    assert pods()["Deployment/code"]["terminationGracePeriodSeconds"] > END_SECONDS
    launched = INSTANCES["kubernetes/instance.yaml"]["run_launcher"]["config"]["run_k8s_config"]
    assert launched["pod_spec_config"]["termination_grace_period_seconds"] > END_SECONDS
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > END_SECONDS
    assert "\nKillMode=mixed\n" in UNIT, "a signal for all of the group would end Java first"
    assert '\nENTRYPOINT ["tini", "--"]\n' in (DEPLOY / "Dockerfile").read_text(), "not -g, for the same reason"


def test_secrets_reach_only_services_that_need_them() -> None:
    secret = {"PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    has = {name for name, one in ours().items() if secret & set(one.get("environment", {}))}
    assert has == {"setup", "code", "metrics", "spark-worker"}
    for one in COMPOSE["services"].values():
        for name, value in one.get("environment", {}).items():
            if re.search("PASSWORD|KEY|CREDENTIAL|IDENTITY", name):
                assert re.fullmatch(r"\$\{\w+:\?see env.example\}", value), name
    assert "spark.authenticate.secret ${SPARK_SECRET:?see env.example}\n" in COMPOSE["configs"]["spark"]["content"]
    offered = re.findall(r"^(\w+)=(.*)$", (DEPLOY / "compose/env.example").read_text(), re.MULTILINE)
    asked = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose/compose.yaml").read_text()))
    assert {name for name, _ in offered} == asked
    assert not [value for _, value in offered if value]
    for name in ("Deployment/webserver", "Deployment/daemon"):
        assert "secretRef" not in json.dumps(pods()[name])


def labels() -> dict[str, dict[str, str]]:
    found = {name: MANIFESTS[name]["spec"]["template"]["metadata"]["labels"] for name in pods()}
    metadata = LAUNCHER["run_k8s_config"]["pod_template_spec_metadata"]
    return {**{name.partition("/")[2]: one for name, one in found.items()}, "run": metadata["labels"]}


def selected(selector: dict[str, Any]) -> set[str]:
    """The kinds of pods that a Kubernetes label selector matches."""
    wanted = {key: {value} for key, value in selector.get("matchLabels", {}).items()}
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In"
        wanted[one["key"]] = set(one["values"])
    return {name for name, own in labels().items() if all(own.get(key) in values for key, values in wanted.items())}


def ports(way: str) -> dict[str, set[int]]:
    """By kind of pod. ``ingress``: the ports of the pod to which other pods may connect. ``egress``: the ports of other
    hosts to which the pod may connect."""
    found: dict[str, set[int]] = {name: set() for name in labels()}
    for policy in POLICIES:
        assert set(policy["podSelector"].get("matchLabels", {})) <= {"app"}
        for name in selected(policy["podSelector"]):
            found[name] |= {port["port"] for rule in policy.get(way, []) for port in rule["ports"]}
    return found


def test_network_policies_allow_each_pod_only_the_connections_that_it_needs() -> None:
    (denied,) = [policy for policy in POLICIES if not policy["podSelector"] and len(policy["policyTypes"]) == 2]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert set(labels()) == {"code", "webserver", "daemon", "run"}
    assert ports("ingress") == {"code": {4000, 9187}, "webserver": set(), "daemon": set(), "run": set()}
    work, dagster = {53, 5432, 443}, {53, 4000, 5432, 443, 6443}
    assert ports("egress") == {"code": work, "run": work, "webserver": dagster, "daemon": dagster}
    answers, scraped = [rule for policy in POLICIES for rule in policy.get("ingress", [])]
    assert [selected(one["podSelector"]) for one in answers["from"]] == [{"webserver", "daemon"}]
    assert (list(scraped["from"][0]), scraped["ports"][0]["port"]) == (["namespaceSelector"], 9187)
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert "network.yaml" in kustomization["resources"]


def test_the_metrics_server_in_the_pod_of_the_code_location_has_no_readiness_probe() -> None:
    (container,) = [one for one in pods()["Deployment/code"]["containers"] if one["name"] == "metrics"]
    assert "readinessProbe" not in container
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    scraped = MANIFESTS["Service/metrics"]["spec"]
    assert scraped["selector"].items() <= labels()["code"].items()
    assert scraped["publishNotReadyAddresses"], "the code location may be unready for another reason"
    (port,) = scraped["ports"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container["ports"]
    service = COMPOSE["services"]["metrics"]
    assert service["ports"] == ["127.0.0.1:9187:9187"]
    assert "PGCDC_SOURCE" in service["environment"]
    hardened = re.findall(r"^(?:Protect|Restrict|NoNew|Capab|Private|Lock|SystemCall)\S+$", UNIT, re.MULTILINE)
    assert set(hardened) <= set(METRICS_UNIT.splitlines())


def test_tags_of_a_run_cannot_change_its_pod() -> None:
    """The settings ``only_allow_user_defined_*`` list which fields and variables of the pod a run's tags may set.
    Without these settings, Dagster allows all. With empty lists, Dagster allows none."""
    assert LAUNCHER["only_allow_user_defined_k8s_config_fields"] == {}
    assert LAUNCHER["only_allow_user_defined_env_vars"] == []


def test_spark_services_share_a_secret_in_a_file() -> None:
    folder = COMPOSE["x-spark"]["SPARK_CONF_DIR"]
    parts = {name for name, one in ours().items() if "SPARK_CONF_DIR" in one.get("environment", {})}
    assert parts == {"code", "spark-master", "spark-worker"}
    for name in parts:
        assert {"source": "spark", "target": f"{folder}/spark-defaults.conf"} in ours()[name]["configs"]
    content = dict(line.split() for line in COMPOSE["configs"]["spark"]["content"].splitlines() if "$" not in line)
    assert content == {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


def test_database_role_of_the_compose_deployment_has_exactly_the_rights_that_it_needs(database: Database) -> None:
    role, slot, password = f"r_{secrets.token_hex(4)}", f"s_{secrets.token_hex(4)}", secrets.token_hex(8)
    text = (DEPLOY / "compose/role.sql").read_text()
    assert "host=source dbname=shop user=replicator" in COMPOSE["services"]["code"]["environment"]["PGCDC_SOURCE"]
    script = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("\\"))
    slot = f"s_{secrets.token_hex(4)}"
    script = (
        script.replace("replicator", role).replace(":'password'", f"'{password}'").replace("slot pgcdc", f"slot {slot}")
    )
    with database.connect() as conn:
        conn.execute("SET shop.scale = 0.01")
        conn.execute((DEPLOY.parent / "pgcdc_assets/demo/shop.sql").read_text().encode())
        conn.execute(script.encode())
        shop = {name for (name,) in conn.execute(
            "SELECT relname::text FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition"
            " AND relnamespace = 'public'::regnamespace")}  # fmt: skip
        try:
            conninfo = make_conninfo(database.conninfo, user=role, password=password)
            report = setup(Settings(source=conninfo, slot=slot), conninfo)
            assert report.created == [f"slot {slot}"]
            assert {table.name.name for table in report.catalog.tables if table.updates_seen} == shop
            assert not [finding for finding in report.findings if finding.severity == "error"]
            granted = conn.execute("SELECT rolsuper, rolcreatedb, rolcreaterole, rolbypassrls, rolreplication"
                                   " FROM pg_roles WHERE rolname = %s", [role]).fetchone()  # fmt: skip
            assert granted == (False, False, False, False, True)
        finally:
            conn.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [slot]
            )
            conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def test_pods_meet_the_security_standard_of_the_namespace() -> None:
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            found = container["securityContext"]
            assert (found["allowPrivilegeEscalation"], found["capabilities"]) == (False, {"drop": ["ALL"]})
            mounted = {one["mountPath"] for one in container["volumeMounts"]}
            assert {"/scratch", "/tmp"} <= mounted, "its root is read only"


def test_deployment_files_name_the_image_of_this_version() -> None:
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


def test_image_and_checkout_have_the_same_package_versions() -> None:
    """The two files ``requirements.lock`` may list different packages. A package that both files list must have the
    same version."""
    pinned = [dict(re.findall(r"^([a-z][\w.-]*)(?:\[\w+\])?==(\S+)", path.read_text(), re.MULTILINE))
              for path in (DEPLOY.parent / "requirements.lock", DEPLOY / "requirements.lock")]  # fmt: skip
    here, image = pinned
    assert {name for name in here.keys() & image.keys() if here[name] != image[name]} == set()
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["deploy"]):
        name = re.split(r"[\[=<>]", line)[0]
        assert name in image
