"""`hpctrain minicluster`: a disposable, real Slurm cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from hpctrain.minicluster.cluster import Cluster
    from hpctrain.minicluster.status import ClusterStatus

minicluster = typer.Typer(
    help="A disposable, real Slurm cluster on this machine, for trying things and for tests. Needs root.\n\n"
    "Every node has its own network address, host name, /tmp and SSD; one directory is shared by all.",
    epilog="Example: hpctrain minicluster up --nodes 3 && hpctrain minicluster shell srun -N3 hostname",
    no_args_is_help=True,
)

_DEFAULT_NAME = "mini"
Name = Annotated[str, typer.Option("--name", help="Which cluster; several can exist beside each other.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="n1, n2 ...", show_default=False)]


@minicluster.command()
def up(
    name: Name = _DEFAULT_NAME,
    nodes: Annotated[int, typer.Option(help="Compute nodes.")] = 3,
    cpus: Annotated[int, typer.Option(help="CPUs of a node; may be more than this machine has.")] = 4,
    ssd_mib: Annotated[int, typer.Option(help="Size of a node's SSD, /mnt/ssd.")] = 512,
    share: Annotated[
        list[Path] | None,
        typer.Option(help="A directory below /tmp or /mnt that hosts are to see, too.", show_default=False),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install Debian or Ubuntu packages that are missing.")
    ] = False,
    no_requeue: Annotated[
        bool, typer.Option("--no-requeue", help="Forbid requeueing (JobRequeue=0).")
    ] = False,
) -> None:
    """Start a cluster, and wait until its nodes are idle.

    Hosts see this machine's files, but have /tmp and /mnt of their own. The current directory, hpctrain and its
    Python are shared with them wherever they are.

    Example: hpctrain minicluster up --nodes 3 --share /tmp/data
    """
    from hpctrain.minicluster import cluster as clusters
    from hpctrain.minicluster.packages import install as install_packages
    from hpctrain.minicluster.packages import missing_packages
    from hpctrain.minicluster.shares import needed_shares
    from hpctrain.minicluster.spec import ClusterSpec

    spec = ClusterSpec(
        name, nodes, cpus, ssd_mib=ssd_mib, shared=needed_shares(share or ()), requeue=not no_requeue
    )
    clusters.require_root()
    if install and (missing := missing_packages()):
        typer.echo(f"installing {', '.join(missing)}")
        install_packages(missing)
    clusters.up(spec, typer.echo)
    which = "" if name == _DEFAULT_NAME else f" --name {name}"
    typer.echo(f"{name}: {nodes} nodes, shared directory {spec.shared_dir}. Next:")
    typer.echo(f"  hpctrain minicluster shell{which}   # then: sinfo; srun -N{nodes} hostname; sbatch ...")
    typer.echo(f"  hpctrain minicluster down{which}")


@minicluster.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD...", help="One command to run.", show_default=False)
    ] = None,
    name: Name = _DEFAULT_NAME,
) -> NoReturn:
    """A shell on the head, or one command there: sbatch, squeue, srun and sacct work. The exit code is its own.

    Options of this verb come before the command.

    Example: hpctrain minicluster shell srun -N3 hostname
    """
    from hpctrain.minicluster.shell import become_shell, directory_inside

    cluster = _cluster(name)
    here = directory_inside(cluster, Path.cwd())
    if here is None:
        here = cluster.spec.shared_dir
        typer.echo(f"hpctrain: {Path.cwd()} is not shared with the cluster: this is {here}", err=True)
    become_shell(cluster, command or [], here)


@minicluster.command()
def status(
    name: Name = _DEFAULT_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show hosts, nodes as Slurm sees them, and jobs.

    Example: hpctrain minicluster status --json
    """
    import json
    from dataclasses import asdict

    from hpctrain.minicluster.status import cluster_status

    found = cluster_status(_cluster(name))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
    else:
        _show(found)


@minicluster.command()
def down(
    name: Name = _DEFAULT_NAME,
    every: Annotated[bool, typer.Option("--all", help="All clusters of this machine.")] = False,
) -> None:
    """End a cluster and remove all that belongs to it, its shared directory, too. Also after a crash of `up`.

    Example: hpctrain minicluster down --all
    """
    from hpctrain.minicluster import cluster as clusters
    from hpctrain.minicluster.namespaces import running_clusters
    from hpctrain.minicluster.spec import cluster_names

    names = sorted({*cluster_names(), *running_clusters()}) if every else [name]
    for each in names:
        typer.echo(f"{each}: {'ended' if clusters.down(each) else 'nothing there'}")
    if not names:
        typer.echo("there is no mini cluster on this machine")


@minicluster.command()
def kill_node(node: Node, name: Name = _DEFAULT_NAME) -> None:
    """Cut the power of a node: everything on it is gone at once. `heal-node` switches it on.

    Example: hpctrain minicluster kill-node n2
    """
    from hpctrain.minicluster import faults

    faults.kill_node(_cluster(name), node)
    typer.echo(f"{node} is off; Slurm calls it down in about 15 s")


@minicluster.command()
def reboot_node(node: Node, name: Name = _DEFAULT_NAME) -> None:
    """Cut the power of a node, and switch it on again: /tmp is empty then, the SSD is not.

    Example: hpctrain minicluster reboot-node n2
    """
    from hpctrain.minicluster import faults

    faults.reboot_node(_cluster(name), node)
    typer.echo(f"{node} was rebooted")


@minicluster.command()
def cut_node(node: Node, name: Name = _DEFAULT_NAME) -> None:
    """Pull the network cable of a node: what runs there goes on, alone. `heal-node` plugs it in.

    Example: hpctrain minicluster cut-node n2
    """
    from hpctrain.minicluster import faults

    faults.cut_node(_cluster(name), node)
    typer.echo(f"{node} is cut off; Slurm calls it down in about 15 s")


@minicluster.command()
def heal_node(node: Node, name: Name = _DEFAULT_NAME) -> None:
    """Undo all faults of a node (power, link, full disk, drain), and wait until Slurm takes it.

    Example: hpctrain minicluster heal-node n2
    """
    from hpctrain.minicluster import faults

    cluster = _cluster(name)
    faults.heal_node(cluster, node)
    cluster.await_states([node], "idle", "mix", "alloc", "comp")
    typer.echo(f"{node} is {cluster.node_states().get(node, 'up')}")


@minicluster.command()
def drain_node(
    node: Node,
    name: Name = _DEFAULT_NAME,
    reason: Annotated[str, typer.Option(help="What Slurm shows as the reason.")] = "drained by hand",
) -> None:
    """Let no job start on a node any more. `heal-node` undoes it.

    Example: hpctrain minicluster drain-node n2 --reason "bad memory"
    """
    from hpctrain.minicluster import faults

    faults.drain_node(_cluster(name), node, reason)
    typer.echo(f"{node} takes no more jobs")


@minicluster.command()
def fill_disk(node: Node, name: Name = _DEFAULT_NAME) -> None:
    """Fill the SSD of a node to the last block. `heal-node` removes what fills it.

    Example: hpctrain minicluster fill-disk n2
    """
    from hpctrain.minicluster import faults
    from hpctrain.minicluster.spec import SSD

    faults.fill_disk(_cluster(name), node)
    typer.echo(f"{SSD} of {node} is full ({SSD / faults.FILL_NAME})")


@minicluster.command()
def slow_link(
    node: Node,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="Such as 10mbit (per second); or `full`.")],
    name: Name = _DEFAULT_NAME,
) -> None:
    """Limit what a node sends and receives over its link.

    Example: hpctrain minicluster slow-link n2 10mbit
    """
    from hpctrain.minicluster import faults

    faults.slow_link(_cluster(name), node, None if rate == "full" else rate)
    typer.echo(f"the link of {node} has {'no limit' if rate == 'full' else rate}")


@minicluster.command()
def preempt(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE...", help="Nodes to take.", show_default=False)
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Take the nodes of this running job.", show_default=False)
    ] = None,
    seconds: Annotated[int, typer.Option(help="For how long.")] = 30,
    name: Name = _DEFAULT_NAME,
) -> None:
    """Submit a job of the partition `urgent`, which preempts others: they are told, and requeued within 60 s.

    Example: hpctrain minicluster preempt --job 7 --seconds 20
    """
    from hpctrain.minicluster import faults

    cluster = _cluster(name)
    wanted = list(dict.fromkeys([*(nodes or []), *(faults.nodes_of_job(cluster, job) if job else [])]))
    urgent = faults.preempt(cluster, wanted, seconds)
    typer.echo(f"job {urgent} takes {', '.join(wanted)} for {seconds} s")


def _cluster(name: str) -> Cluster:
    from hpctrain.minicluster.cluster import Cluster

    return Cluster(name)


def _show(found: ClusterStatus) -> None:
    from rich.table import Table

    from hpctrain.cli.status import show

    slurm = found.slurm_version + ("" if found.answers else ", slurmctld does not answer")
    left = f"down; `hpctrain minicluster down --name {found.name}` removes what is left"
    typer.echo(f"{found.name}: {slurm if found.up else left}")
    typer.echo(f"shared directory {found.shared}, SSD of every node {found.ssd}")
    hosts = Table("host", "power", "address", "link", "state", "reason")
    for host in found.hosts:
        hosts.add_row(host.name, "on" if host.up else "off", host.address, host.link, host.state, host.reason)
    jobs = Table("job", "partition", "name", "state", "time", "nodes", "reason")
    for job in found.jobs:
        jobs.add_row(job.job, job.partition, job.name, job.state, job.time, job.nodes, job.reason)
    for table in (hosts, *([jobs] if found.jobs else [])):
        show(table)
