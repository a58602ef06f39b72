from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError, UsageError
from hpctrain.minicluster import spec as module
from hpctrain.minicluster.cluster import down
from hpctrain.minicluster.shares import needed_shares
from hpctrain.minicluster.spec import ClusterSpec, cluster_names, covering, load_spec


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STATE_ROOT", tmp_path / "clusters")
    return tmp_path / "clusters"


def test_every_host_has_an_address_of_its_own():
    spec = ClusterSpec(num_nodes=200)
    addresses = [spec.address(host) for host in spec.hosts]
    assert len(set(addresses)) == 201
    assert addresses[:2] == ["10.77.0.1", "10.77.0.2"]
    assert addresses[-1] == "10.77.0.201"


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@given(st.text(max_size=20) | st.text("../-a1", max_size=20))
def test_a_name_is_one_plain_word_or_refused(name):
    plain = set(name) <= set(_LETTERS + "0123456789-") and name[:1] in list(_LETTERS) and len(name) <= 16
    if plain:
        assert ClusterSpec(name).state_dir.parent == module.STATE_ROOT
    else:
        with pytest.raises(UsageError, match="small letters"):
            ClusterSpec(name)


@pytest.mark.parametrize("name", ["..", "../etc", "", "a/b", "A", "a\n", "-a", "x" * 17, "/", "."])
def test_no_path_is_built_from_a_bad_name(name, monkeypatch):
    for act in (ClusterSpec, load_spec, down):
        monkeypatch.setattr(
            "hpctrain.minicluster.cluster.require_root", lambda: None
        )  # before it, names count
        with pytest.raises(UsageError, match="small letters"):
            act(name)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_nodes", 0, "1 to 200"),
        ("num_nodes", 201, "1 to 200"),
        ("num_nodes", 1.5, "1 to 200"),
        ("cpus_per_node", 0, "at least 1"),
        ("ssd_mib", 7, "at least 8"),
        ("partitions", {"main": ["n1"]}, "other than main, urgent"),
        ("partitions", {"a b": ["n1"]}, "small letters"),
        ("partitions", {"few": ["n4"]}, "no node 'n4'"),
        ("partitions", {"few": []}, "no nodes"),
        ("shared", ["/home/me"], "below /tmp or /mnt"),
        ("shared", ["/tmp"], "below /tmp or /mnt"),
        ("shared", ["/tmp/../etc"], "below /tmp or /mnt"),
        ("shared", ["tmp/x"], "below /tmp or /mnt"),
    ],
)
def test_what_cannot_work_is_refused(field, value, says):
    with pytest.raises(UsageError, match=says):
        ClusterSpec(**{field: value})


def test_a_description_comes_back_as_it_was_saved(root):
    spec = ClusterSpec("a", 2, partitions={"few": ["n1"]}, shared=["/tmp/x"], requeue=False)
    spec.state_dir.mkdir(parents=True)
    spec.save()
    assert load_spec("a") == spec
    assert cluster_names() == ["a"]


def test_the_clusters_that_exist_are_named(root):
    assert cluster_names() == []
    for name in ("b", "a", "Not-One"):
        (root / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'c' \(there is: a, b\).*up --name c`, or name one of them"):
        load_spec("c")


@pytest.mark.parametrize("content", ["{", "[]", "null", ""])
def test_a_torn_description_says_what_removes_it(root, content):
    (root / "a").mkdir(parents=True)
    (root / "a" / "spec.json").write_text(content)
    with pytest.raises(ConfigError, match=r"spec.json is damaged.*down --name a` removes"):
        load_spec("a")


def test_a_cluster_that_is_only_begun_says_what_removes_it(root):
    (root / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="down --name a` removes"):
        load_spec("a")


@pytest.mark.parametrize(
    "content", [{"name": "a", "more": 1}, {"name": "a", "num_nodes": "3"}, {"name": "a", "partitions": 3}]
)
def test_a_description_of_another_version_says_what_removes_it(root, content):
    (root / "a").mkdir(parents=True)
    (root / "a" / "spec.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"another version; .*down --name a") as caught:
        load_spec("a")
    assert "instances" not in str(caught.value)  # Python's words say nothing to who only typed a command


def test_what_covers_a_path():
    assert covering(Path("/tmp/a/b")) == Path("/tmp")
    assert covering(Path("/mnt/c/Users")) == Path("/mnt")


def test_what_a_run_needs_is_shared_once(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "deep").mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.setattr("sys.prefix", str(link))
    monkeypatch.setattr("sys.base_prefix", "/usr")
    monkeypatch.chdir(real / "deep")
    monkeypatch.setattr(module, "COVERED", (tmp_path,))
    monkeypatch.setattr("hpctrain.minicluster.shares.COVERED", (tmp_path,))
    assert needed_shares([Path("/etc")]) == [str(link), str(real)]
    with pytest.raises(UsageError, match="no such directory"):
        needed_shares([tmp_path / "missing"])
    with pytest.raises(UsageError, match="every host has its own"):
        needed_shares([tmp_path])
