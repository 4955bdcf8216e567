"""Bookkeeping of cache blocks in pure Python: groups, pools, and the manager that scheduling talks to."""
