"""The configuration files of Slurm and its helpers (slurm.conf(5), slurmdbd.conf(5), cgroup.conf(5))."""

from __future__ import annotations

import secrets
from pathlib import Path

from hpctrain.minicluster.files import make_directory, write_public
from hpctrain.minicluster.spec import HEAD, ClusterSpec

_SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for the lifetime of the old credential (120 s by default).
AuthInfo=cred_expire=10
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobRequeue={requeue}
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=10
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
StateSaveLocation={head_dir}/slurmctld
SlurmctldLogFile={head_dir}/log/slurmctld.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdSpoolDir={hosts_dir}/%n/spool
SlurmdLogFile={hosts_dir}/%n/log/slurmd.log
SlurmdPidFile=/run/slurmd.pid
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={head}
"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost={head}
SlurmUser=root
LogFile={head_dir}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
"""
_MEMORY_MIB = 4096  # per node that Slurm is told; it holds nobody to it
_CGROUP_CONF = "CgroupAutomount=no\n"
_SHELL_RC = """\
[ -r ~/.bashrc ] && . ~/.bashrc
PS1='[{name}] \\u@\\h:\\w\\$ '
"""

SHELL_RC = Path("/etc/slurm/shellrc")
"""What an interactive bash on a host reads: the user's own settings, and a prompt that names the cluster."""


def write_configuration(spec: ClusterSpec) -> None:
    """Write all files that the hosts read: etc/, and the munge key."""
    for directory in (spec.etc_dir, spec.munge_dir):
        make_directory(directory)
    write_public(spec.etc_dir / "slurm.conf", slurm_conf(spec))
    write_public(spec.etc_dir / "cgroup.conf", _CGROUP_CONF)
    hosts = [f"{spec.address(host)} {host}" for host in spec.hosts]
    write_public(spec.etc_dir / "hosts", "\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
    write_public(spec.etc_dir / SHELL_RC.name, _fill(_SHELL_RC, spec))
    _write_private(spec.etc_dir / "slurmdbd.conf", _fill(_SLURMDBD_CONF, spec).encode())
    _write_private(spec.etc_dir / "munge.key", secrets.token_bytes(128))


def slurm_conf(spec: ClusterSpec) -> str:
    """The text of slurm.conf."""
    nodes = [
        f"NodeName={node} NodeHostname={node} NodeAddr={spec.address(node)} "
        f"CPUs={spec.cpus_per_node} RealMemory={_MEMORY_MIB}"
        for node in spec.nodes
    ]
    grace = "PriorityTier=1 PreemptMode=REQUEUE GraceTime=60"
    partitions = [
        f"PartitionName=main Nodes=ALL Default=YES DefaultTime=60 MaxTime=INFINITE {grace}",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
        *(
            f"PartitionName={name} Nodes={','.join(members)} DefaultTime=60 MaxTime=INFINITE {grace}"
            for name, members in spec.partitions.items()
        ),
    ]
    return "\n".join([_fill(_SLURM_CONF, spec).rstrip(), *nodes, *partitions]) + "\n"


def _fill(template: str, spec: ClusterSpec) -> str:
    return template.format(
        name=spec.name,
        head=HEAD,
        head_address=spec.address(HEAD),
        head_dir=spec.host_dir(HEAD),
        hosts_dir=spec.host_dir(HEAD).parent,
        requeue=int(spec.requeue),
    )


def _write_private(path: Path, content: bytes) -> None:
    """Secrets: nobody else may read them at any time."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
