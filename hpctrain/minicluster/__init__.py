"""A disposable, real Slurm cluster on one Linux machine, for trying things and for tests.

A host of the cluster is a set of Linux namespaces (network, mount, host name, processes) with a small init process. All
that a host does lives in them, so that ending its init ends everything: the processes by the kernel's hand, the mounts
and the network with the namespaces. `head` runs munge, MariaDB, slurmdbd and slurmctld; `n1`, `n2` ... run slurmd.
"""
