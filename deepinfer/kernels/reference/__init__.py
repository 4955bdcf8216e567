"""Plain torch: the CPU backend, and the oracle of every other kernel."""
