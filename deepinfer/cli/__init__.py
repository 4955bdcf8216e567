"""The commands `deepinfer` and `deepinfer-cluster`."""
