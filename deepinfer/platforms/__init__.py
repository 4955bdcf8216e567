"""Accelerators: device, streams, memory, collective backend; one file each, loaded when selected."""
