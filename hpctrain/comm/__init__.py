"""Horovod over MPI: the world, the gradient reduction, the lockstep guard, and the builder of Horovod."""
