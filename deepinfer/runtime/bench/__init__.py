"""One rank of a group, run alone with made-up requests, and measured step by step."""
