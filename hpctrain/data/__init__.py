"""Which samples each lane sees, in which order, and the threads that bring them."""
