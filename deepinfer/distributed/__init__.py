"""Process groups of a role, the per-step agreement of its ranks, and the exchange of tokens with experts."""
