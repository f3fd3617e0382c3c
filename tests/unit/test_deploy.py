"""What runs Firnline elsewhere: the image, the systemd unit, the workflow. Checked as far as it goes without them."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent.parent
UNIT = ROOT / "deploy" / "firnline@.service"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their arguments on one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in lines]


def test_everything_that_the_image_copies_is_there_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, f"{source} is not sent to the build"


def test_the_image_holds_what_the_package_needs_to_be_built() -> None:
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    sdist = re.search(r"only-include = \[(.*?)\]", (ROOT / "pyproject.toml").read_text())
    assert sdist is not None
    assert {name.split("/")[0] for name in re.findall(r'"(.*?)"', sdist[1])} <= copied


def test_the_image_runs_as_a_user_without_privileges_with_java_and_a_healthcheck() -> None:
    words = [word for word, _ in instructions()]
    given = dict(instructions())
    assert given["USER"] not in ("root", "0")
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "jre-headless" in next(rest for word, rest in instructions() if "openjdk" in rest)
    assert "-slim" in given["FROM"]
    assert given["ENTRYPOINT"] == '["firnline-entrypoint"]'
    assert "/healthz" in given["HEALTHCHECK"]


def test_the_image_serves_probes_everywhere_and_metrics_with_a_token(tmp_path: Path) -> None:
    given = [rest for word, rest in instructions() if word == "ENV"]
    environment = dict(pair.split("=", 1) for rest in given for pair in rest.split())
    assert environment["FIRNLINE_METRICS_HOST"] == "0.0.0.0"
    folder = Path(environment["FIRNLINE_METRICS_TOKEN_FILE"]).parent
    made_writable = f"chmod -R a+rwX {folder}"
    assert any(made_writable in rest for word, rest in instructions() if word == "RUN"), "no user can make the token"
    exposed = next(rest for word, rest in instructions() if word == "EXPOSE")
    assert environment["FIRNLINE_METRICS_PORT"] == exposed


def test_the_entry_point_passes_words_and_exit_code_on(tmp_path: Path) -> None:
    fake = tmp_path / "firnline"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    fake.chmod(0o755)
    entry = ROOT / "deploy" / "entrypoint.sh"
    assert os.access(entry, os.X_OK)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(entry), "run", "two words"], env=environment, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.stdout.splitlines() == ["run", "two words"]
    assert done.returncode == 7


def test_the_healthcheck_of_the_image_follows_the_answer_of_a_run() -> None:
    import json

    from prometheus_client import CollectorRegistry

    from firnline.service.endpoints import Endpoints, ServeAt
    from firnline.service.health import CommitterHealth

    check = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    health = CommitterHealth(lambda: 0.0)
    with Endpoints(CollectorRegistry(), health, ServeAt(0)) as served:
        environment = {**os.environ, "FIRNLINE_METRICS_PORT": str(served.port)}
        command = [sys.executable, *check[1:]]
        assert subprocess.run(command, env=environment, timeout=240).returncode == 0
    gone = subprocess.run(command, env=environment, capture_output=True, timeout=240)
    assert gone.returncode != 0


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_stops_and_restarts_as_the_pages_say() -> None:
    service = unit()["Service"]
    assert service["ExecStart"].split()[1:] == ["run", "--standby"]
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"].split() == ["1", "2"]
    assert service["User"] == "firnline"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    program = unit()["Service"]["ExecStart"].split()[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert UNIT.stem.rstrip("@") not in done.stdout, done.stdout


def test_the_workflow_calls_the_script_that_every_machine_runs() -> None:
    workflow: dict[str, Any] = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["ci"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def manifests() -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy" / "kubernetes" / "firnline.yml").read_text()
    return {document["kind"]: document for document in YAML(typ="safe").load_all(text)}


def test_the_manifest_probes_and_stops_as_the_image_expects() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    exposed = int(next(rest for word, rest in instructions() if word == "EXPOSE"))
    assert [port["containerPort"] for port in container["ports"] if port["name"] == "metrics"] == [exposed]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert "--standby" in container["args"]
    user = next(re.search(r"--uid (\d+)", rest) for word, rest in instructions() if "useradd" in rest)
    assert user is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1])


def test_the_manifest_fits_together() -> None:
    found = manifests()
    deployment = found["Deployment"]["spec"]
    assert deployment["strategy"] == {"type": "Recreate"}
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    text = (ROOT / "deploy" / "kubernetes" / "firnline.yml").read_text()
    made = dict(re.findall(r"create secret generic (\S+) (.*)", text))
    for variable in container["env"]:
        if "valueFrom" in variable:
            secret = variable["valueFrom"]["secretKeyRef"]
            assert f"--from-literal={secret['key']}=" in made[secret["name"]]
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == ["orders-metrics"]


def test_the_spec_of_the_manifest_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline import Pipeline

    monkeypatch.setenv("STORE_DSN", "postgresql://me@localhost/firnline")
    (tmp_path / "firnline.yml").write_text(manifests()["ConfigMap"]["data"]["firnline.yml"])
    options = Pipeline.load(tmp_path / "firnline.yml").options
    assert options.name == "orders"
    assert options.checkpoint.store is not None


def test_the_unit_of_the_service_ends_no_run() -> None:
    from firnline.cli.main import app

    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy" / "firnline-serve.service")
    service = parser["Service"]
    assert service["KillMode"] == "process"
    assert service["RestartPreventExitStatus"].split() == ["2", "6"]
    app.parse_args(service["ExecStart"].split()[1:], exit_on_error=False, print_error=False)
