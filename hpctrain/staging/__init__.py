"""Copies of shared data on the node: the mirror, and the stager that fills it while training runs."""
