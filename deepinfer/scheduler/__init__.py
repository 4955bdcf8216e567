"""Scheduling without torch and Ray: the driver's view (requests, batches) and the rank's view (sequences, steps)."""
