"""Drafts and their verification: proposing tokens, accepting them without changing the output, planning how many."""
