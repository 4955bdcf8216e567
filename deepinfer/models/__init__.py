"""Models behind one contract; each brings its config, caches, weights and forward pass in a folder of its own."""
