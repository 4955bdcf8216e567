"""Accelerators: device, streams, memory; one file each, loaded when selected."""
