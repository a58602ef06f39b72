"""The Python environment as one archive for the nodes' own disks: made on a login node, unpacked once per node."""
