"""OpenAI batch files: rows in, answers out, durable and resumable."""

from __future__ import annotations

from deepinfer.batch_file.job import JobOptions, JobProgress, RowRunner, run_job

__all__ = ["JobOptions", "JobProgress", "RowRunner", "run_job"]
