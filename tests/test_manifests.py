"""The Kubernetes manifests: what they say of themselves agrees, and with what the processes they start rely on."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from longtrain.config import load
from longtrain.errors import (
    CheckFailed,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    NonFiniteError,
    Preempted,
)
from longtrain.parallel.cluster import JOBSET_PORT, find_cluster
from runs import CHECKOUT

MANIFESTS = sorted((CHECKOUT / "scripts" / "kubernetes").glob("*.yaml"))
CHIPS = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}


class Manifest:
    def __init__(self, path: Path):
        self.whole: dict[str, Any] = yaml.safe_load(path.read_text())
        self.name = self.whole["metadata"]["name"]
        (self.job,) = self.whole["spec"]["replicatedJobs"]
        self.spec = self.job["template"]["spec"]
        self.pod = self.spec["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.command = [*self.container["command"], *self.container["args"]]
        self.chips = self.container["resources"]["limits"][CHIPS[path.stem]]

    def environment(self, pod: int) -> dict[str, str]:
        """What Kubernetes and JobSet put into the environment of a pod of this number."""
        annotations = {
            "batch.kubernetes.io/job-completion-index": str(pod),
            "jobset.sigs.k8s.io/jobset-name": self.name,
            "jobset.sigs.k8s.io/replicatedjob-name": self.job["name"],
            "jobset.sigs.k8s.io/job-index": "0",
        }

        def text(variable: dict[str, Any]) -> str:
            if "value" in variable:
                return variable["value"]
            named = re.fullmatch(r"metadata\.annotations\['(.*)'\]", variable["valueFrom"]["fieldRef"]["fieldPath"])
            assert named is not None
            return annotations[named[1]]

        return {"JOB_COMPLETION_INDEX": str(pod)} | {each["name"]: text(each) for each in self.container["env"]}


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def manifest(request) -> Manifest:
    return Manifest(request.param)


def test_it_is_a_job_that_kubernetes_takes(manifest: Manifest):
    validator = pytest.importorskip("kubernetes_validate", reason="its schemas are large: pip install it to run this")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": manifest.name}}
    template = manifest.job["template"]
    validator.validate(job | template, "1.31", strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(job | {"spec": template["spec"] | {"completion": 8}}, "1.31", strict=True)


def test_a_jobset_has_no_other_keys(manifest: Manifest):
    """Those of jobset.x-k8s.io/v1alpha2, as its own reference lists them."""
    whole, policy = manifest.whole, manifest.whole["spec"]["failurePolicy"]
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(whole) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(whole["spec"]) == {"failurePolicy", "replicatedJobs"}
    assert set(policy) == {"maxRestarts", "rules"}
    assert [set(rule) for rule in policy["rules"]] == [{"name", "action", "onJobFailureReasons"}]
    assert set(manifest.job) == {"name", "replicas", "template"}
    longest = f"{manifest.name}-{manifest.job['name']}-0-{manifest.spec['completions'] - 1}"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", longest) and len(longest) < 63


def test_what_a_restart_would_not_mend_ends_it_and_nothing_else_does(manifest: Manifest):
    (rule,) = manifest.spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == manifest.container["name"]
    final = set(rule["onExitCodes"]["values"])
    assert final == {error.exit_code for error in (ConfigError, DataError, NonFiniteError, CheckpointError)}
    assert not final & {error.exit_code for error in (CheckFailed, ClusterError, Preempted)}
    (of_jobset,) = manifest.whole["spec"]["failurePolicy"]["rules"]
    assert of_jobset["action"] == "FailJobSet" and of_jobset["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert manifest.spec["backoffLimit"] == 0 and manifest.pod["restartPolicy"] == "Never"


def test_its_config_is_for_as_many_devices_as_it_has(manifest: Manifest, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert manifest.spec["completions"] == manifest.spec["parallelism"]
    path, *overrides = manifest.container["args"]
    assert load(path, overrides).mesh.size == manifest.chips * manifest.spec["completions"]


def test_every_process_knows_its_place(manifest: Manifest, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    config = load(manifest.container["args"][0])
    pods = manifest.spec["completions"]
    first = f"{manifest.name}-{manifest.job['name']}-0-0.{manifest.name}:{JOBSET_PORT}"
    assert manifest.container["ports"] == [{"containerPort": JOBSET_PORT}]
    found = []
    for pod in range(pods):
        environment = manifest.environment(pod)
        if manifest.command[0] == "scripts/launch_local.sh":
            found += launched(int(manifest.command[1]), environment)
        else:
            cluster = find_cluster(config, environment)
            assert cluster is not None
            found.append((cluster.coordinator, cluster.processes, cluster.process))
    assert found == [(first, len(found), process) for process in range(len(found))]


def launched(processes: int, environment: dict[str, str]) -> list[tuple[str, int, int]]:
    """The place of each process that launch_local.sh starts in a pod, which has a GPU each."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
    told = ["sh", "-c", "echo " + " ".join(f"${name}" for name in names)]
    command = [str(CHECKOUT / "scripts" / "launch_local.sh"), str(processes), *told]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    lines = sorted((line.split()[-4:] for line in done.stdout.splitlines()), key=lambda line: int(line[2]))
    assert [line[3] for line in lines] == [str(place) for place in range(processes)]
    return [(line[0], int(line[1]), int(line[2])) for line in lines]
