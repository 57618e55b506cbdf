"""The files of ``configs/deploy``, held against what they start: routes, options, settings, metrics."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from fastapi import FastAPI
from fastapi.routing import APIRoute

from diffserve.cli.app import app as command_line
from diffserve.cluster.config import read_arguments, read_cluster
from diffserve.cluster.ray_calls import DRAIN_S, SERVED
from diffserve.service.admission import Admission
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.service.metrics import Metrics
from diffserve.service.run import GOODBYE_S
from diffserve.settings.config import Settings
from diffserve.settings.layers import NOT_SETTINGS, load_settings

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "configs" / "deploy"
MANIFESTS = sorted(path.name for path in DEPLOY.glob("*.yaml") if path.name != "compose.yaml")
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
WANTED = {
    ("v1", "Service"): ("spec.selector", "spec.ports"),
    ("apps/v1", "Deployment"): ("spec.selector.matchLabels", "spec.template.metadata.labels", "spec.template.spec"),
    ("policy/v1", "PodDisruptionBudget"): ("spec.selector",),
    ("networking.k8s.io/v1", "NetworkPolicy"): ("spec.podSelector", "spec.policyTypes", "spec.ingress", "spec.egress"),
    ("keda.sh/v1alpha1", "ScaledObject"): ("spec.scaleTargetRef.name", "spec.triggers"),
    ("v1", "ConfigMap"): ("data",),
    ("ray.io/v1", "RayCluster"): ("spec.headGroupSpec.template.spec", "spec.workerGroupSpecs"),
    ("ray.io/v1", "RayService"): ("spec.serveConfigV2", "spec.rayClusterConfig.headGroupSpec.template.spec"),
    ("ray.io/v1", "RayJob"): ("spec.entrypoint", "spec.rayClusterSpec.headGroupSpec.template.spec"),
}
LEAVES_S = GOODBYE_S + 5
"""Seconds that a server takes at most beyond ``shutdown_timeout_s``, 5 of them for its engine."""
METRIC = re.compile(r"diffserve_\w+(?:\{[^}]*\})?")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def value_at(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec, wherever it stands."""
    if isinstance(node, Mapping):
        if isinstance(node.get("containers"), list):
            yield dict(node)
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Load settings from environment variables; an unknown name or value raises ConfigError."""
    return load_settings(env={name: value for name, value in environment.items() if name.startswith("DIFFSERVE_")})


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Parse the options of a command with the real command line; an unknown option raises."""
    command: Any = typer.main.get_command(command_line)
    name, *options = arguments
    while hasattr(command := command.commands[name], "commands"):
        name, *options = options
    return dict(command.make_context(name, options).params)


@pytest.fixture(scope="module")
def routes() -> set[str]:
    async def make() -> FastAPI:
        config = load_settings(env={})
        return create_app(EngineClient(config), config.serve, Gate())

    app = asyncio.run(make())
    return {route.path for route in app.routes if isinstance(route, APIRoute)}


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_document_says_what_its_kind_must(name: str) -> None:
    for document in documents(name):
        kind = (document["apiVersion"], document["kind"])
        assert kind in WANTED, f"say in WANTED what {kind} needs"
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        missing = [path for path in WANTED[kind] if value_at(document, path) is None]
        assert not missing, f"{kind} lacks {missing}"
    assert documents(name)


def test_everything_selects_the_pods_of_the_deployment() -> None:
    by_kind = {document["kind"]: document for document in documents("kubernetes.yaml")}
    labels = value_at(by_kind["Deployment"], "spec.template.metadata.labels")
    for kind, path in (
        ("Deployment", "spec.selector.matchLabels"),
        ("Service", "spec.selector"),
        ("PodDisruptionBudget", "spec.selector.matchLabels"),
        ("NetworkPolicy", "spec.podSelector.matchLabels"),
    ):
        assert value_at(by_kind[kind], path) == labels, kind
    [container] = value_at(by_kind["Deployment"], "spec.template.spec.containers")
    [port] = container["ports"]
    [served] = by_kind["Service"]["spec"]["ports"]
    assert served["targetPort"] == port["name"]
    assert by_kind["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [
        {"protocol": "TCP", "port": port["containerPort"]}
    ]
    assert by_kind["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == by_kind["Deployment"]["metadata"]["name"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_have_no_root_write_to_volumes_alone_and_know_their_settings(name: str) -> None:
    every = list(pods(documents(name)))
    assert every
    for pod in every:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 10_000
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes
            assert {"/data", "/tmp"} <= set(mounts)
            assert container["resources"]["limits"]["memory"]
            environment = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
            settings_of({name: value for name, value in environment.items() if name not in NOT_SETTINGS})


def test_a_server_is_let_finish_and_its_probes_and_options_are_real(routes: set[str]) -> None:
    [pod] = pods(documents("kubernetes.yaml"))
    [container] = pod["containers"]
    options = parsed(container["args"])
    settings = settings_of(
        {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    )
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > waits_s + settings.serve.shutdown_timeout_s + LEAVES_S
    ready = container["readinessProbe"]
    assert waits_s >= ready["periodSeconds"] * ready["failureThreshold"], "nobody is sent to one who is leaving"
    [port] = container["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert options["data_dir"] in {mount["mountPath"] for mount in container["volumeMounts"]}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} <= routes
    assert {probe["port"] for probe in probes} == {port["name"]}
    [names] = [
        variable["value"] for variable in container["env"] if variable["name"] == "DIFFSERVE_SERVE_ALLOWED_HOSTS"
    ]
    [service] = [document for document in documents("kubernetes.yaml") if document["kind"] == "Service"]
    assert service["metadata"]["name"] in names.split(",")


def test_a_server_reports_the_scaling_metric() -> None:
    metrics = Metrics()
    Admission(load_settings(env={}), metrics)
    metrics_text = metrics.render(None).decode()
    triggers = [
        trigger
        for document in documents("kubernetes.yaml")
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    metric_names = [metric for trigger in triggers for metric in METRIC.findall(trigger["metadata"]["query"])]
    assert metric_names == ['diffserve_queue_age_seconds{kind="image"}']
    assert [metric for metric in metric_names if f"\n{metric} " not in metrics_text] == []
    assert all(float(trigger["metadata"]["threshold"]) > 0 for trigger in triggers)


def test_a_cluster_has_its_front_next_to_the_head_and_room_for_every_replica(routes: set[str], tmp_path: Path) -> None:
    by_kind = {document["kind"]: document for document in documents("ray-cluster.yaml")}
    ray, files = by_kind["RayCluster"], by_kind["ConfigMap"]["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    cluster, settings = (
        read_cluster(tmp_path / "cluster.toml"),
        load_settings(config=str(tmp_path / "serve.toml"), env={}),
    )
    pod = ray["spec"]["headGroupSpec"]["template"]["spec"]
    head, front = pod["containers"]
    options = parsed(front["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in front["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/config"]]["configMap"]["name"] == by_kind["ConfigMap"]["metadata"]["name"]
    assert (options["file"], options["config"]) == (Path("/config/cluster.toml"), "/config/serve.toml")
    secret = volumes[mounts["/token"]]["secret"]
    assert secret == {"secretName": ray["metadata"]["name"], "items": [{"key": "auth_token", "path": "auth_token"}]}
    assert (options["address"], options["token_file"]) == ("auto", Path("/token/auth_token"))
    assert ray["spec"]["authOptions"] == {"mode": "token"}
    [key] = [
        variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in front["env"]
        if variable["name"] == "DIFFSERVE_API_KEY"
    ]
    assert key != secret["secretName"], "which KubeRay makes itself"
    shared = {mount["mountPath"]: mount["name"] for mount in head["volumeMounts"]}
    assert {path: mounts[path] for path in ("/tmp", "/dev/shm")} == {
        path: shared[path] for path in ("/tmp", "/dev/shm")
    }
    waits_s = front["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > waits_s + settings.serve.shutdown_timeout_s + LEAVES_S
    probes = [front[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} <= routes
    [port] = front["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    [service] = [by_kind["Service"]]
    assert service["spec"]["selector"] == {"ray.io/cluster": ray["metadata"]["name"], "ray.io/node-type": "head"}
    assert service["metadata"]["name"] in settings.serve.allowed_hosts
    [group] = ray["spec"]["workerGroupSpecs"]
    assert group["replicas"] == cluster.replicas.max
    [worker] = group["template"]["spec"]["containers"]
    assert float(worker["resources"]["requests"]["nvidia.com/gpu"]) == cluster.replicas.gpus
    assert float(worker["resources"]["requests"]["cpu"]) == cluster.replicas.cpus
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_S


def test_a_ray_service_has_an_application_that_there_is_and_lets_it_finish(tmp_path: Path) -> None:
    by_kind = {document["kind"]: document for document in documents("ray-service.yaml")}
    spec, files = by_kind["RayService"]["spec"], by_kind["ConfigMap"]["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    serve_config = yaml.safe_load(spec["serveConfigV2"])
    [application] = serve_config["applications"]
    module, builder = application["import_path"].split(":")
    defined = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")).body
    assert builder in [node.name for node in defined if isinstance(node, ast.FunctionDef)]
    builder_args = {name: value.replace("/config", str(tmp_path)) for name, value in application["args"].items()}
    settings, cluster = read_arguments(builder_args)
    ray = spec["rayClusterConfig"]
    [group] = ray["workerGroupSpecs"]
    head, worker = ray["headGroupSpec"]["template"]["spec"], group["template"]["spec"]
    assert ray["authOptions"] == {"mode": "token"}
    for pod in (head, worker):
        [container] = pod["containers"]
        assert {variable["name"]: variable.get("value") for variable in container["env"]}.items() >= SERVED.items()
        [config] = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config"]
        assert config == by_kind["ConfigMap"]["metadata"]["name"], "an application may be built on any of them"
        waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert waits_s >= settings.serve.shutdown_timeout_s + 10
        assert pod["terminationGracePeriodSeconds"] > waits_s + 5
    assert spec["rayClusterDeletionDelaySeconds"] > settings.serve.shutdown_timeout_s + 10
    [front] = head["containers"]
    ports = {port["name"]: port["containerPort"] for port in front["ports"]}
    assert serve_config["http_options"] == {"host": "0.0.0.0", "port": ports["serve"]}
    assert "DIFFSERVE_API_KEY" in {variable["name"] for variable in front["env"]}, "proxies are for others, too"
    assert f"{by_kind['RayService']['metadata']['name']}-serve-svc" in settings.serve.allowed_hosts
    assert group["replicas"] == cluster.replicas.max
    resources = worker["containers"][0]["resources"]["requests"]
    assert (float(resources["nvidia.com/gpu"]), float(resources["cpu"])) == (
        cluster.replicas.gpus,
        cluster.replicas.cpus,
    )


def test_a_job_runs_a_command_that_there_is() -> None:
    [job] = documents("ray-batch.yaml")
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "diffserve"
    options = parsed(arguments)
    assert options["cluster"] is True
    assert options["address"] == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    shared = [
        pod
        for pod in pods(job)
        if any("persistentVolumeClaim" in volume_container for volume_container in pod["volumes"])
    ]
    assert len(shared) == 1 + len(cluster["workerGroupSpecs"]), "all of them see the pictures"
    mounts = {
        mount["mountPath"]
        for pod in shared
        for volume_container in pod["containers"]
        for mount in volume_container["volumeMounts"]
    }
    assert all(any(Path(str(options[name])).is_relative_to(path) for path in mounts) for name in ("prompts", "output"))
    assert cluster["authOptions"] == {"mode": "token"}


def test_composed_services_are_let_finish_have_no_root_and_are_on_loopback(routes: set[str]) -> None:
    [composed] = documents("compose.yaml")
    for service in composed["services"].values():
        environment = service["environment"]
        settings = settings_of({name: value for name, value in environment.items() if name not in NOT_SETTINGS})
        assert seconds(service["stop_grace_period"]) > settings.serve.shutdown_timeout_s + LEAVES_S
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert int(service["user"].partition(":")[0]) >= 10_000
        assert parsed(service["command"])["host"] == "0.0.0.0"
        assert [port for port in service["ports"] if not port.startswith("127.0.0.1:")] == []
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        volume_names = [volume.rsplit(":/", 1)[0] for volume in service["volumes"]]
        assert "data" in volume_names
    assert "data" in composed["volumes"]


class Instruction(NamedTuple):
    """An instruction of a Dockerfile; ``stage`` is the number of its FROM."""

    stage: int
    word: str
    arguments: str


def instructions(name: str) -> list[Instruction]:
    rows = [row for row in (DEPLOY / name).read_text(encoding="utf-8").splitlines() if not row.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(rows))
    stage, parsed_lines = -1, []
    for row in text.splitlines():
        if row.strip():
            word, _, argument = row.strip().partition(" ")
            stage += word == "FROM"
            parsed_lines.append(Instruction(stage, word, argument.strip()))
    return parsed_lines


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_in_stages_and_the_last_has_no_tools_no_root_and_a_pulse(name: str, routes: set[str]) -> None:
    every = instructions(name)
    allowed_words = {
        "ARG",
        "FROM",
        "ENV",
        "WORKDIR",
        "RUN",
        "COPY",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
    }
    assert {instruction.word for instruction in every} <= allowed_words | {"ENTRYPOINT", "CMD"}
    last = max(instruction.stage for instruction in every)
    assert last == 1
    of_last = [instruction for instruction in every if instruction.stage == last]
    by_word = {instruction.word: instruction.arguments for instruction in of_last}
    assert not [
        instruction
        for instruction in of_last
        if instruction.word == "RUN" and re.search(r"\b(pip|apt|apt-get|gcc|curl)\b", instruction.arguments)
    ]
    assert [instruction.arguments.split()[0] for instruction in of_last if instruction.word == "COPY"] == [
        "--from=build"
    ]
    uid = int(by_word["USER"].partition(":")[0])
    assert f"--uid {uid}" in " ".join(instruction.arguments for instruction in of_last if instruction.word == "RUN")
    words = [instruction.word for instruction in of_last]
    assert words.index("USER") < words.index("ENTRYPOINT")
    probe = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", by_word["HEALTHCHECK"])
    assert probe is not None
    assert probe[2] in routes
    command = yaml.safe_load(by_word["CMD"])
    assert yaml.safe_load(by_word["ENTRYPOINT"]) == ["diffserve"]
    options = parsed(command)
    assert str(options["port"]) == probe[1] == by_word["EXPOSE"]
    assert options["host"] == "0.0.0.0"
    environment = dict(pair.split("=", 1) for pair in by_word["ENV"].split())
    assert settings_of(environment).serve.data_dir == by_word["VOLUME"] == "/data"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_from_files_that_there_are_with_tested_versions(name: str) -> None:
    copied = [
        instruction.arguments.split()[:-1]
        for instruction in instructions(name)
        if instruction.word == "COPY" and instruction.stage == 0
    ]
    sources = {source for some in copied for source in some}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {"diffserve", "schedulers", "ui", "configs", "constraints.txt", "pyproject.toml"} <= sources
    ignored = (DEPLOY / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{source}" for source in sources} == {row for row in ignored if row.startswith("!")}
    installs = [instruction.arguments for instruction in instructions(name) if "pip install" in instruction.arguments]
    assert installs
    assert [row for row in installs if "-c constraints.txt" not in row] == []
    bases = {instruction.arguments.split()[0] for instruction in instructions(name) if instruction.word == "FROM"}
    assert bases == {"python:3.11-slim"}, "constraints.txt is of Python 3.11"
