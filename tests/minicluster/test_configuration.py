from __future__ import annotations

import os
import stat

import pytest

from hpctrain.minicluster import spec as module
from hpctrain.minicluster.configuration import slurm_conf, write_configuration
from hpctrain.minicluster.spec import ClusterSpec


def _parsed(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """slurm.conf(5): settings, and the lines that describe nodes and partitions."""
    settings: dict[str, str] = {}
    described = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        pairs = dict(word.split("=", 1) for word in line.split())
        if line.startswith(("NodeName", "PartitionName")):
            described.append(pairs)
        else:
            assert len(pairs) == 1, line
            assert not settings.keys() & pairs.keys(), f"{line} is said twice"
            settings |= pairs
    return settings, described


@pytest.mark.parametrize("num_nodes", [1, 3, 200])
def test_slurm_conf_describes_every_node_once(num_nodes):
    spec = ClusterSpec(num_nodes=num_nodes, cpus_per_node=7)
    _, described = _parsed(slurm_conf(spec))
    nodes = [entry for entry in described if "NodeName" in entry]
    assert [node["NodeName"] for node in nodes] == spec.nodes
    assert {node["NodeAddr"] for node in nodes} == {spec.address(name) for name in spec.nodes}
    assert all(node["CPUs"] == "7" and node["RealMemory"] == "4096" for node in nodes)


def test_slurm_conf_has_the_partitions():
    spec = ClusterSpec(partitions={"few": ["n1", "n3"]})
    _, described = _parsed(slurm_conf(spec))
    partitions = {entry["PartitionName"]: entry for entry in described if "PartitionName" in entry}
    assert set(partitions) == {"main", "urgent", "few"}
    assert partitions["few"]["Nodes"] == "n1,n3"
    assert partitions["main"]["Default"] == "YES"
    assert int(partitions["urgent"]["PriorityTier"]) > int(partitions["main"]["PriorityTier"])


@pytest.mark.parametrize(("requeue", "said"), [(True, "1"), (False, "0")])
def test_slurm_conf_says_whether_jobs_may_be_requeued(requeue, said):
    settings, _ = _parsed(slurm_conf(ClusterSpec("other", requeue=requeue)))
    assert settings["JobRequeue"] == said
    assert settings["ClusterName"] == "other"
    assert settings["SlurmctldHost"] == "head(10.77.0.1)"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_secrets_are_private_and_differ(tmp_path, monkeypatch, umask):
    """And all else is for everybody, however careless or careful the caller is."""
    monkeypatch.setattr(module, "STATE_ROOT", tmp_path)
    specs = [ClusterSpec("a"), ClusterSpec("b")]
    before = os.umask(umask)
    try:
        for spec in specs:
            write_configuration(spec)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in specs[0].etc_dir.iterdir()}
    assert modes.pop("munge.key") == modes.pop("slurmdbd.conf") == 0o600
    assert modes == dict.fromkeys(("slurm.conf", "cgroup.conf", "hosts", "shellrc"), 0o644)
    assert stat.S_IMODE(specs[0].etc_dir.stat().st_mode) == 0o755
    keys = [(spec.etc_dir / "munge.key").read_bytes() for spec in specs]
    assert len(keys[0]) >= 32
    assert keys[0] != keys[1]


def test_every_host_knows_the_others_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STATE_ROOT", tmp_path)
    spec = ClusterSpec("a", 2)
    write_configuration(spec)
    lines = (spec.etc_dir / "hosts").read_text().splitlines()
    assert lines == ["127.0.0.1 localhost", "10.77.0.1 head", "10.77.0.2 n1", "10.77.0.3 n2"]
