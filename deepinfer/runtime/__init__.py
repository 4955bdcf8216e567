"""One rank without Ray: from a step plan to its output, and the loop around it."""
