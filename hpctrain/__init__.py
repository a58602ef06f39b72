"""hpctrain: pack, stage, train on Horovod over MPI, and end with the weights the run would have had."""

__version__ = "0.1.0"
